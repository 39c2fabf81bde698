"""Copies of write logs that rot: what others have is taken, and nothing that is wrong is shown or passed on."""

from group_cases import BLOCKS, History, comes_back, create, goes_on_at, is_served, is_whole, nodes, record
from log_cases import damage, flip

# Where the ring of a log begins, in bytes.
RING_START = 32 * 4096


def in_log(history, index):
    """The newest content of one of the blocks, as it lies in the log once."""
    numbers = [number for allowed, number in history.told.values() if allowed == {number}]
    return history.block(sorted(numbers)[index])


def test_blocks_that_rot_under_the_primary_are_got_from_a_member(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(21)
        history.write(a, 300)
        a.kill()
        a.start()
        # What it has replayed is in no memory: it is read from the log.
        is_served(a)
        is_whole(a, 2)
        for index in (3, 50, 51, 120):
            damage(a.log_of("v"), in_log(history, index))
        history.check(a)
        volume = a.volume("v")
        assert volume["counters"]["log_corrupt_blocks"] == 0
        assert volume["state"] == "healthy"
        # It was written again, and not only answered.
        content = a.log_of("v").read_bytes()
        for index in (3, 50, 51, 120):
            assert content.count(in_log(history, index)) == 1
        # Destage reads it too.
        damage(a.log_of("v"), in_log(history, 7))
        a.ok("volume", "flush", "v")
        image = (tmp_path / "v.img").read_bytes()
        for at, (allowed, _) in history.told.items():
            assert image[at * 4096 : (at + 1) * 4096] in [history.block(number) for number in allowed if number] \
                or 0 in allowed


def test_blocks_that_rot_while_no_member_is_there_are_an_error_and_not_wrong_data(tmp_path):
    with nodes(tmp_path, **{"cluster.member_deadline_ms": 500}) as (a, b):
        create((a, b), tmp_path)
        history = History(22)
        history.write(a, 100)
        a.kill()
        a.start()
        is_served(a)
        b.kill()
        lost = in_log(history, 5)
        at = next(at for at, (allowed, number) in history.told.items()
                  if allowed == {number} and history.block(number) == lost)
        damage(a.log_of("v"), lost)
        client = a.nbd("v")
        try:
            found = client.pread(4096, at * 4096)
        except Exception as error:
            assert error.errno == "EIO"
        else:
            raise AssertionError(f"{found[:20]!r} was read")
        assert a.volume("v")["counters"]["log_corrupt_blocks"] == 1
        a.until(lambda: record(a)["members"] == ["a"])
        # The member comes back, and with it what had rotted.
        comes_back(b, a)
        a.until(lambda: a.read_all("v", BLOCKS * 4096)[at * 4096 : (at + 1) * 4096] == lost)


def test_copy_whose_data_is_damaged_is_brought_up_anew_by_itself(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(8)
        history.write(a, 300)
        b.kill()
        before = record(a)["revision"]
        damage(b.log_of("v"), in_log(history, 30))
        b.start()
        b.tells("data blocks of its copy of the log are damaged")
        # It leaves, and joins.
        a.until(lambda: record(a)["revision"] >= before + 2)
        is_whole(a, 2)
        history.write(a, 50)
        goes_on_at(a, b, history)


def test_primary_whose_data_is_damaged_does_not_serve_before_it_was_brought_up_anew(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(23)
        history.write(a, 200)
        a.kill()
        damage(a.log_of("v"), in_log(history, 30))
        a.start()
        a.tells("did not take its group")
        b.ok("volume", "takeover", "v")
        is_whole(b, 2)
        history.check(b)
        goes_on_at(b, a, history)


def test_copy_whose_spans_are_damaged_is_left_as_it_is_and_one_that_is_gone_is_brought_up_anew(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(8)
        history.write(a, 300)
        b.kill()
        log = b.log_of("v")
        # The first block of the ring is the head of a span.
        flip(log, RING_START + 100)
        b.start()
        b.tells("its copy: ")
        history.write(a, 50)
        assert record(a)["members"] == ["a"]
        b.kill()
        log.unlink()
        comes_back(b, a)
        history.write(a, 50)
        goes_on_at(a, b, history)


def test_scrub_mends_a_block_of_the_primarys_log_and_it_goes_on_serving(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(9)
        history.write(a, 100)
        with open(a.log_of("v"), "r+b") as file:
            data = file.read()
            at = data.rindex(b"write ") // 4096 * 4096
            file.seek(at)
            file.write(b"rot!" * 1024)
        a.cli("volume", "scrub", "v")
        history.write(a, 50)
        history.check(a)
        assert record(a)["primary"] == "a"
