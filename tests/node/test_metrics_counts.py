"""What the metrics say that requests cost: turns, calls of the kernel, spans, and where their time goes."""

import nbd
import pytest

from daemon import DIRTY, Daemon, samples

BLOCK = 4096
WRITES = 64


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """One daemon for the tests of this module."""
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        daemon.create("v", *DIRTY)
        yield daemon
        daemon.stop()


def page(daemon):
    status, text = daemon.api("GET", "/metrics")
    assert status == 200
    return samples(text)


def grown(daemon, act):
    """By how much each metric grows while `act` runs."""
    before = page(daemon)
    act()
    after = page(daemon)
    return {name: value - before.get(name, 0) for name, value in after.items()}


def write_one_by_one(daemon):
    client = daemon.nbd("v")
    for number in range(WRITES):
        client.pwrite(b"w" * BLOCK, number * BLOCK)
    client.shutdown()


def test_shard_counts_what_writes_one_by_one_cost(daemon):
    found = grown(daemon, lambda: write_one_by_one(daemon))
    shard = {name: found[f'hdcs_shard_{name}_total{{shard="0"}}']
             for name in ("turns", "wakeups", "enters", "completions", "receives", "sends", "replies")}
    # Each has to come in, go to the log and be answered: none shares a receive, a turn or a send with another.
    assert shard["replies"] == WRITES
    assert shard["receives"] >= WRITES
    assert shard["sends"] >= WRITES
    assert shard["turns"] >= WRITES
    assert shard["wakeups"] > 0
    assert shard["enters"] > 0
    # At least a receive and a log write each; what a socket takes at once is sent without an operation.
    assert shard["completions"] >= 2 * WRITES


def test_spans_hold_what_was_written_and_say_where_its_time_went(daemon):
    found = grown(daemon, lambda: write_one_by_one(daemon))
    assert found['hdcs_volume_log_entries_total{volume="v"}'] == WRITES
    # One after the other: a span each, and never two at once.
    assert found['hdcs_volume_log_spans_total{volume="v"}'] == WRITES
    assert found['hdcs_volume_log_spans_in_flight_total{volume="v"}'] == WRITES
    assert found['hdcs_volume_log_entry_seconds_total{volume="v",stage="device"}'] > 0
    assert found['hdcs_volume_log_entry_seconds_total{volume="v",stage="open"}'] >= 0
    assert found['hdcs_volume_queued_seconds_total{volume="v"}'] == 0


def test_writes_that_come_together_share_spans(daemon):
    def together():
        client = daemon.nbd("v")
        data = nbd.Buffer.from_bytearray(bytearray(b"t" * BLOCK))
        cookies = [client.aio_pwrite(data, number * BLOCK) for number in range(WRITES)]
        while client.aio_in_flight():
            client.poll(-1)
        assert all(client.aio_command_completed(one) for one in cookies)
        client.shutdown()

    found = grown(daemon, together)
    assert found['hdcs_volume_log_entries_total{volume="v"}'] == WRITES
    assert found['hdcs_volume_log_spans_total{volume="v"}'] < WRITES
    assert found['hdcs_shard_replies_total{shard="0"}'] == WRITES


def test_limited_requests_wait_before_their_volume(daemon):
    daemon.ok("volume", "set", "v", "iops_max=200")
    found = grown(daemon, lambda: write_one_by_one(daemon))
    daemon.ok("volume", "set", "v", "iops_max=0")
    assert found['hdcs_volume_queued_seconds_total{volume="v"}'] > 0


def test_thread_of_the_data_path_says_its_processor_time(daemon):
    found = page(daemon)
    times = [found[f'hdcs_shard_cpu_seconds_total{{shard="0",mode="{mode}"}}'] for mode in ("user", "system")]
    assert sum(times) > 0
    shards = daemon.json("status")["shards"]
    assert len(shards) == 1
    assert shards[0]["turns"] >= found['hdcs_shard_turns_total{shard="0"}']
