"""NBD with libnbd: its tools nbdinfo and nbdcopy, and its python binding."""

import errno
import json
import random
import socket
import struct

import nbd
import pytest

from programs import CLIENT_SECONDS, MIB, run

SIZE = 64 * MIB
CLEAN, DIRTY, COLD = 1, 2, 4


@pytest.fixture
def connect():
    """Connects handles that are shut down with the test."""
    handles = []

    def connect(uri, structured=True, contexts=("base:allocation", "hdcs:cache")):
        handle = nbd.NBD()
        handle.set_request_structured_replies(structured)
        for context in contexts if structured else ():
            handle.add_meta_context(context)
        handle.connect_uri(uri)
        handles.append(handle)
        return handle

    yield connect
    for handle in handles:
        if handle.aio_is_ready():
            handle.shutdown()


@pytest.fixture(params=[True, False], ids=["structured", "simple"])
def handle(connect, volume, request):
    """A connected handle, once with structured and once with simple replies."""
    return connect(volume, request.param)


def pattern(size, seed):
    """Bytes that only this seed gives."""
    return random.Random(seed).randbytes(size)


def extents(handle, context, offset, length, flags=0):
    """The runs of one context, asked for until the whole range is described."""
    runs = []
    end = offset + length

    def collect(name, start, entries, error):
        nonlocal offset
        if name == context:
            for size, state in zip(entries[::2], entries[1::2]):
                runs.append((start, size, state))
                start += size
            offset = start
        return 0

    while offset < end:
        before = offset
        handle.block_status(end - offset, offset, collect, flags)
        assert offset > before
        if flags:
            break
    return runs


def state_at(runs, offset):
    """The state of the run that holds an offset."""
    return next(state for start, size, state in runs if start <= offset < start + size)


def failure(call, *arguments):
    """The errno that a call ends with."""
    with pytest.raises(nbd.Error) as caught:
        call(*arguments)
    return caught.value.errnum


def test_nbdinfo_lists_and_describes(server, volume):
    name = "odd-size"
    server.create(name, size=1 * MIB + 512)
    listed = json.loads(run("nbdinfo", "--list", "--json", server.uri()).stdout)
    sizes = {export["export-name"]: export["export-size"] for export in listed["exports"]}
    assert sizes[name] == 1 * MIB + 512
    export = json.loads(run("nbdinfo", "--json", volume).stdout)["exports"][0]
    expected = {
        "export-size": SIZE,
        "is_read_only": False,
        "is_rotational": False,
        "can_cache": True,
        "can_df": True,
        "can_fast_zero": False,
        "can_flush": True,
        "can_fua": True,
        "can_multi_conn": True,
        "can_trim": True,
        "can_zero": True,
        "block_size_minimum": 512,
        "block_size_preferred": 4096,
        "block_size_maximum": 32 * MIB,
        "contexts": ["base:allocation", "hdcs:cache"],
    }
    assert {key: export[key] for key in expected} == expected


def test_nbdinfo_maps_a_new_volume(volume):
    rows = json.loads(run("nbdinfo", "--json", "--map", volume).stdout)
    assert sum(row["length"] for row in rows) == SIZE
    assert all(row["type"] in (0, 3) for row in rows)


def test_nbdcopy_there_and_back(server, volume, tmp_path):
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(pattern(SIZE, 1))
    run("nbdcopy", "--flush", source, volume)
    run("nbdcopy", volume, back)
    assert back.read_bytes() == source.read_bytes()
    other = server.uri(server.new_volume(SIZE))
    run("nbdcopy", "--connections=4", "--requests=64", volume, other)
    run("nbdcopy", "--synchronous", other, back)
    assert back.read_bytes() == source.read_bytes()


def test_unknown_export_is_named_as_such(server, connect):
    assert failure(connect, server.uri("nothing")) == errno.ENOENT


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_match_a_model(handle, seed):
    print("seed", seed)
    rng = random.Random(seed)
    model = bytearray(SIZE)
    for step in range(400):
        length = rng.choice([512, 512, 1024, 4096, 5120, 65536, rng.randrange(1, 6000) * 512])
        offset = rng.randrange((SIZE - length) // 512 + 1) * 512
        part = slice(offset, offset + length)
        fua = rng.choice([0, nbd.CMD_FLAG_FUA])
        action = rng.randrange(10)
        if action < 4:
            data = pattern(length, seed * 1000 + step)
            handle.pwrite(data, offset, fua)
            model[part] = data
        elif action == 4:
            handle.zero(length, offset, fua | rng.choice([0, nbd.CMD_FLAG_NO_HOLE]))
            model[part] = bytes(length)
        elif action == 5:
            handle.trim(length, offset, fua)
            model[part] = bytes(length)
        elif action == 6:
            rng.choice([handle.flush, lambda: handle.cache(length, offset)])()
        else:
            assert handle.pread(length, offset) == model[part]
    for offset in range(0, SIZE, 8 * MIB):
        assert handle.pread(8 * MIB, offset) == model[offset : offset + 8 * MIB]


def test_largest_request(handle):
    data = pattern(32 * MIB, 2)
    handle.pwrite(data, 512, nbd.CMD_FLAG_FUA)
    assert handle.pread(32 * MIB, 512) == data
    handle.zero(48 * MIB, 0)
    assert handle.pread(32 * MIB, 16 * MIB) == bytes(32 * MIB)


def test_structured_read_arrives_in_chunks_that_cover_it(connect, volume):
    handle = connect(volume)
    data = pattern(4 * MIB, 3)
    handle.pwrite(data, 0)
    chunks = {}

    def collect(chunk, offset, status, error):
        assert status == nbd.READ_DATA
        chunks[offset] = bytes(chunk)
        return 0

    handle.pread_structured(3 * MIB, 512 * 1024, collect)
    whole = b"".join(chunk for _, chunk in sorted(chunks.items()))
    assert whole == data[512 * 1024 : 512 * 1024 + 3 * MIB]
    chunks.clear()
    handle.pread_structured(MIB, 512, collect, nbd.CMD_FLAG_DF)
    assert chunks == {512: data[512 : 512 + MIB]}
    arguments = (2 * MIB, 0, collect, nbd.CMD_FLAG_DF)
    assert failure(handle.pread_structured, *arguments) == errno.EOVERFLOW


def test_many_requests_in_flight(handle):
    data = pattern(SIZE // 4, 4)
    block = 4096
    order = list(range(0, len(data), block))
    random.Random(4).shuffle(order)

    def drive(start, depth=128):
        flying, waiting = [], iter(order)
        done = 0
        while done < len(order):
            while len(flying) < depth and (offset := next(waiting, None)) is not None:
                flying.append(start(offset))
            handle.poll(CLIENT_SECONDS * 1000)
            still = [cookie for cookie in flying if not handle.aio_command_completed(cookie)]
            done += len(flying) - len(still)
            flying = still

    drive(lambda at: handle.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data[at : at + block])), at))
    buffers = {at: nbd.Buffer(block) for at in order}
    drive(lambda at: handle.aio_pread(buffers[at], at))
    assert all(buffers[at].to_bytearray() == data[at : at + block] for at in order)


def test_flush_on_one_connection_covers_another(connect, volume):
    first, second = connect(volume), connect(volume)
    assert first.can_multi_conn()
    first.pwrite(b"x" * 4096, 8192)
    assert second.pread(4096, 8192) == b"x" * 4096
    second.flush()
    second.pwrite(b"y" * 512, 8192 + 512, nbd.CMD_FLAG_FUA)
    assert first.pread(2048, 8192) == b"x" * 512 + b"y" * 512 + b"x" * 1024


def test_block_status_of_allocation(connect, volume):
    handle = connect(volume)
    handle.pwrite(b"x" * MIB, 4 * MIB)
    handle.flush()
    runs = extents(handle, "base:allocation", 0, SIZE)
    assert [start for start, _, _ in runs][0] == 0
    assert sum(size for _, size, _ in runs) == SIZE
    for (start, size, _), (following, _, _) in zip(runs, runs[1:]):
        assert start + size == following
    assert state_at(runs, 4 * MIB) == 0
    assert all(state in (0, nbd.STATE_ZERO, nbd.STATE_ZERO | nbd.STATE_HOLE) for *_, state in runs)
    for start, size, state in runs:
        if state & nbd.STATE_ZERO:
            assert handle.pread(min(size, 32 * MIB), start) == bytes(min(size, 32 * MIB))
    one = extents(handle, "base:allocation", 512, SIZE - 512, nbd.CMD_FLAG_REQ_ONE)
    assert len(one) == 1 and one[0][0] == 512


def test_block_status_of_the_cache(connect, volume):
    handle = connect(volume)
    handle.pwrite(b"x" * MIB, 4 * MIB)
    runs = extents(handle, "hdcs:cache", 0, SIZE)
    assert sum(size for _, size, _ in runs) == SIZE
    assert all(state in (CLEAN, DIRTY, COLD, 0) for *_, state in runs)
    assert state_at(runs, 4 * MIB) in (DIRTY, CLEAN)


def test_contexts_can_be_listed(server, volume):
    handle = nbd.NBD()
    handle.set_opt_mode(True)
    handle.connect_uri(volume)

    def listed(*queries):
        names = []
        handle.clear_meta_contexts()
        for query in queries:
            handle.add_meta_context(query)
        handle.opt_list_meta_context(lambda name: names.append(name) or 0)
        return sorted(names)

    assert listed() == ["base:allocation", "hdcs:cache"]
    assert listed("hdcs:") == ["hdcs:cache"]
    assert listed("base:") == ["base:allocation"]
    assert listed("qemu:") == []
    handle.opt_abort()


def test_mistakes_get_an_error_and_the_connection_stays(handle):
    handle.set_strict_mode(0)
    handle.pwrite(b"x" * 512, 0)
    assert failure(handle.pread, 512, SIZE) == errno.EINVAL
    assert failure(handle.pread, 1024, SIZE - 512) == errno.EINVAL
    assert failure(handle.pread, 512, 1) == errno.EINVAL
    assert failure(handle.pread, 100, 0) == errno.EINVAL
    assert failure(handle.pread, 32 * MIB + 512, 0) == errno.EINVAL
    assert failure(handle.pwrite, b"y" * 513, 0) == errno.EINVAL
    assert failure(handle.pwrite, b"y" * MIB, SIZE - MIB + 512) == errno.ENOSPC
    assert failure(handle.pwrite, b"y" * 512, 1 << 62) == errno.ENOSPC
    assert failure(handle.zero, 1024, SIZE - 512) == errno.ENOSPC
    assert failure(handle.trim, 1024, SIZE - 512) == errno.EINVAL
    assert failure(handle.trim, 0, 0) == errno.EINVAL
    assert failure(handle.cache, 512, 3) == errno.EINVAL
    assert failure(handle.pread, 512, 0, nbd.CMD_FLAG_NO_HOLE) == errno.EINVAL
    assert handle.pread(512, 0) == b"x" * 512
    assert handle.pread(512, SIZE - 512) == bytes(512)


def raw(server):
    """A bare connection whose client has greeted the server."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(CLIENT_SECONDS)
    connection.connect(str(server.data / "nbd.sock"))
    greeting = connection.recv(18, socket.MSG_WAITALL)
    assert greeting[:16] == b"NBDMAGICIHAVEOPT"
    connection.sendall(struct.pack(">I", 3))
    return connection


def ends(connection):
    """Whether the server closes a connection, whatever it sends before."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_malformed_input_ends_that_connection_only(server, volume, connect):
    handle = connect(volume)
    name = volume.split("/")[3].split("?")[0].encode()
    go = b"IHAVEOPT" + struct.pack(">II", 7, len(name) + 6)
    go += struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
    request = struct.pack(">IHHQQI", 0x25609513, 0, 1, 1, 0, 32 * MIB + 512)
    for bytes_after_greeting in [
        b"GET / HTTP/1.1\r\n\r\n",
        b"IHAVEOPT" + struct.pack(">II", 1, 0xFFFFFFFF),
        b"IHAVEOPT" + struct.pack(">II", 1, 3) + b"\xff\xfe\x00",
        go + b"\0" * 28,
        go + request,
    ]:
        with raw(server) as connection:
            connection.sendall(bytes_after_greeting)
            assert ends(connection)
        handle.pwrite(b"z" * 512, 0)
        assert handle.pread(512, 0) == b"z" * 512


def test_connection_lost_in_mid_write_harms_nobody(server, volume, connect):
    handle = connect(volume)
    name = volume.split("/")[3].split("?")[0].encode()
    go = b"IHAVEOPT" + struct.pack(">II", 7, len(name) + 6)
    go += struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
    for length in [1, 27, 28, 28 + 100, 28 + MIB + 5]:
        request = struct.pack(">IHHQQI", 0x25609513, 0, 1, 1, 32 * MIB, 4 * MIB)
        with raw(server) as connection:
            connection.sendall(go + (request + b"q" * (4 * MIB))[:length])
        assert handle.pread(512, 0) == bytes(512)


def test_many_connections(connect, volume):
    handles = [connect(volume) for _ in range(16)]
    for number, handle in enumerate(handles):
        handle.pwrite(bytes([number]) * 512, number * 512)
    for number, handle in enumerate(reversed(handles)):
        assert handle.pread(512, number * 512) == bytes([number]) * 512
