"""Fixed clusters: what their nodes are told, refuse and show."""

import json
import uuid

import pytest
from daemon import CONFIG, Daemon, hdcs, refused


def cluster(records, node="a", **changes):
    """The configuration of a node of two."""
    config = {
        "cluster.id": str(uuid.UUID(int=9)),
        "cluster.node": node,
        "cluster.listen": "127.0.0.1:7001",
        "cluster.records": str(records),
    }
    for number, name in ((1, "a"), (2, "b")):
        config[f"cluster.nodes.{name}.number"] = number
        config[f"cluster.nodes.{name}.id"] = str(uuid.UUID(int=number))
        config[f"cluster.nodes.{name}.address"] = f"127.0.0.1:700{number}"
    return {**config, **changes}


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"cluster.node": "c"}, ["there is no [cluster.nodes.c]", "a, b"]),
        ({"cluster.nodes.b.number": 1}, ["same `number`, 1"]),
        ({"cluster.records": "/nowhere/records"}, ["/nowhere/records", "make the directory"]),
        ({"cluster.listen": "0.0.0.0:7001"}, ["other hosts can reach", "plain_open"]),
    ],
)
def test_cluster_that_cannot_be_is_refused_at_the_start(tmp_path, changes, parts):
    records = tmp_path / "records"
    records.mkdir()
    config = tmp_path / "bad.toml"
    keys = {**CONFIG, **cluster(records, **changes)}
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    refused(hdcs("serve", "--config", config, "--data", tmp_path / "data"), 2, *parts)


def test_node_of_a_cluster_shows_its_groups_and_refuses_what_cannot_be(tmp_path):
    records = tmp_path / "records"
    records.mkdir()
    with Daemon(tmp_path, config=cluster(records)) as daemon:
        listed = hdcs("group", "list", "--json", "--data", daemon.data)
        assert json.loads(listed.stdout) == []
        for command in (("group", "show"), ("volume", "takeover")):
            refused(hdcs(*command, "v", "--data", daemon.data), 1, "volume v: it has no group")
        create = ["volume", "create", "v", "--size", "1G", "--replicas", "2", "--data", daemon.data]
        refused(hdcs(*create, "--nodes", "b,a"), 2, "the first of its nodes", "a, b")
        refused(hdcs(*create, "--nodes", "a,c"), 2, "there is no node c")
        refused(hdcs(*create, "--nodes", "a,b"), 2, "give --backend")
        backend = f"file:{tmp_path}/v.img"
        storage = ["--nodes", "a,b", "--backend", backend, "--mode", "storage"]
        refused(hdcs(*create, *storage), 2, "storage mode")
        through = ["--nodes", "a,b", "--backend", backend, "--set", "log_failure=pass-through"]
        refused(hdcs(*create, *through), 2, "log_failure=read-only")


def test_node_that_is_alone_has_no_groups(tmp_path):
    with Daemon(tmp_path) as daemon:
        refused(hdcs("group", "list", "--data", daemon.data), 1, "this node is alone")
        create = ["volume", "create", "v", "--size", "1G", "--replicas", "2", "--nodes", "a,b"]
        refused(hdcs(*create, "--data", daemon.data), 2, "give [cluster]")
