"""Copies of write logs that rot: what others have is taken, and nothing that is wrong is shown or passed on."""

from daemon import hdcs
from group_cases import BLOCKS, History, comes_back, create, goes_on_at, is_served, is_whole, nodes, record
from log_cases import damage, flip

# Where the ring of a log begins, in bytes.
RING_START = 32 * 4096


def check(daemon, *parts):
    """What the check of a node that is down says of its copy: nothing is lost that others have."""
    done = hdcs("check", daemon.data / "volumes" / "v", "--no-backend")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1, said
    for part in parts:
        assert part in said, said
    assert "are lost" not in said, said


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
        # Another node has it.
        check(b, "4096 bytes of the volume in 1 places are missing here")
        b.start()
        b.tells("data blocks of its copy of the log are damaged")
        # It leaves, and joins.
        a.until(lambda: record(a)["revision"] >= before + 2)
        is_whole(a, 2)
        history.write(a, 50)
        goes_on_at(a, b, history)


def test_primary_whose_data_is_damaged_gets_it_from_a_member_and_serves(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(23)
        history.write(a, 200)
        a.kill()
        damaged = in_log(history, 30)
        damage(a.log_of("v"), damaged)
        a.start()
        is_served(a)
        assert a.log_of("v").read_bytes().count(damaged) == 1
        history.check(a)
        is_whole(a, 2)
        goes_on_at(a, b, history)


def test_copy_that_is_damaged_while_its_node_runs_is_mended_when_it_takes_over(tmp_path):
    with nodes(tmp_path, 3) as (a, b, c):
        create((a, b, c), tmp_path)
        history = History(28)
        history.write(a, 300)
        damaged = in_log(history, 50)
        damage(b.log_of("v"), damaged)
        goes_on_at(a, b, history)
        assert b.log_of("v").read_bytes().count(damaged) == 1
        assert b.volume("v")["counters"]["log_corrupt_blocks"] == 0


def test_copies_that_are_damaged_at_different_places_make_one_that_serves(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(24)
        history.write(a, 200)
        a.kill()
        b.kill()
        for index in (30, 31, 50):
            damage(a.log_of("v"), in_log(history, index))
        for index in (10, 90):
            damage(b.log_of("v"), in_log(history, index))
        a.start()
        # Without the other one it says what it waits for.
        a.until(lambda: "damaged at blocks" in (a.volume("v")["reason"] or ""))
        b.start()
        is_served(a)
        history.check(a)
        is_whole(a, 2)
        goes_on_at(a, b, history)


def test_what_no_copy_has_whole_is_said_and_nobody_serves(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(25)
        history.write(a, 100)
        a.kill()
        b.kill()
        for daemon in (a, b):
            damage(daemon.log_of("v"), in_log(history, 30))
        before = [daemon.log_of("v").read_bytes()[RING_START:] for daemon in (a, b)]
        b.start()
        a.start()
        a.tells("this node's copy of the log is damaged at blocks ")
        a.until(lambda: "no member has given that whole" in (a.volume("v")["reason"] or ""))
        done = b.cli("volume", "takeover", "v")
        assert done.returncode == 1 and "no member has given that whole" in done.stderr, done.stderr
        # That is said as long as nobody has taken the group.
        b.until(lambda: "no member has given that whole" in (b.volume("v")["reason"] or ""))
        assert b.volume("v")["state"] == "error"
        # Nothing was given up.
        assert [daemon.log_of("v").read_bytes()[RING_START:] for daemon in (a, b)] == before
        # What is given up is what the log has, not what it could have.
        lost = b.json("volume", "delete", "v", "--discard-dirty")["discarded_dirty_bytes"]
        assert 0 < lost <= 100 * 4096, lost


def other(daemon, name):
    """The state in which the primary sees another node."""
    others = daemon.json("group", "show", "v")["here"]["others"]
    return next((one["state"] for one in others if one["node"] == name), None)


def without_last(daemons, tmp_path, seed):
    """The last node is away, and lacks the newest writes, the last of which is returned: where and what."""
    create(daemons, tmp_path, ack="majority")
    history = History(seed)
    history.write(daemons[0], 50)
    daemons[-1].kill()
    daemons[0].until(lambda: record(daemons[0])["members"] == ["a", "b"])
    history.write(daemons[0], 50)
    last = history.writes
    at = next(at for at, (_, number) in history.told.items() if number == last)
    return history, at, history.block(last)


def test_joiner_gets_what_has_rotted_at_the_primary_from_another_member(tmp_path):
    with nodes(tmp_path, 3, **{"cluster.member_deadline_ms": 500}) as (a, b, c):
        history, _, newest = without_last((a, b, c), tmp_path, 26)
        damage(a.log_of("v"), newest)
        c.start()
        is_whole(a, 3)
        assert a.log_of("v").read_bytes().count(newest) == 1
        a.kill()
        b.kill()
        b.start()
        c.ok("volume", "takeover", "v")
        history.check(c)


def test_joiner_that_needs_what_nobody_has_whole_is_blocked_until_the_log_lets_go_of_that(tmp_path):
    with nodes(tmp_path, 3, **{"cluster.member_deadline_ms": 500}) as (a, b, c):
        history, at, newest = without_last((a, b, c), tmp_path, 27)
        for daemon in (a, b):
            damage(daemon.log_of("v"), newest)
        c.start()
        a.until(lambda: other(a, "c") == "blocked")
        a.tells("the node cannot be brought up")
        history.writes += 1
        client = a.nbd("v")
        client.pwrite(history.block(history.writes), at * 4096)
        client.shutdown()
        history.told[at] = ({history.writes}, history.writes)
        a.ok("volume", "flush", "v")
        is_whole(a, 3)
        a.until(lambda: other(a, "c") == "in-step")
        history.check(a)
        assert a.log().count("the node cannot be brought up") == 1


def test_copy_whose_spans_are_damaged_is_left_as_it_is_and_one_that_is_gone_is_brought_up_anew(tmp_path):
    with nodes(tmp_path) as (a, b):
        create((a, b), tmp_path)
        history = History(8)
        history.write(a, 300)
        b.kill()
        log = b.log_of("v")
        # The first block of the ring is the head of a span.
        flip(log, RING_START + 100)
        check(b, "if this is a copy of a volume whose log other nodes have too")
        b.start()
        # It says what becomes of it, and what to do.
        b.tells("The copy is left as it is, and the group goes on without it. If another member's copy is whole")
        b.tells(f"stop this node, remove {log} and start it")
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
