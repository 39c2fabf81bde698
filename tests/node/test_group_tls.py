"""Nodes that speak TLS to one another, each with a certificate of its own."""

import uuid
from contextlib import contextmanager

from daemon import Daemon, homes
from group_cases import History, comes_back, config_of, create, free_ports, goes_on_at, record
from tls_daemon import tls_sh

CLUSTER = uuid.UUID(int=9)


def name_of(number, cluster=CLUSTER):
    """What the certificate of a node is to say."""
    return f"DNS:{uuid.UUID(int=number)}.{cluster}.hdcs"


def certify(authority, directory, name):
    """A certificate that an authority has signed for this name, as the keys of [cluster]."""
    tls_sh(authority, "node", directory, name)
    files = authority / directory
    return {
        "cluster.tls_certificate": str(files / "node-cert.pem"),
        "cluster.tls_key": str(files / "node-key.pem"),
        "cluster.tls_authority": str(authority / "ca-cert.pem"),
    }


@contextmanager
def both(tmp_path, second):
    """Two nodes, of which the second one has these keys."""
    records, authority = tmp_path / "records", tmp_path / "tls"
    records.mkdir()
    tls_sh(authority)
    ports = free_ports(2)
    first_home, second_home = homes(tmp_path, 2)
    keys = {**certify(authority, "a", name_of(1)), "cluster.member_deadline_ms": 500}
    with (
        Daemon(first_home, config_of(0, ports, records, keys)) as a,
        Daemon(second_home, config_of(1, ports, records, {**keys, **second(authority)})) as b,
    ):
        yield a, b


def with_tls(authority):
    return certify(authority, "b", name_of(2))


def test_volume_goes_on_at_another_node_over_tls(tmp_path):
    with both(tmp_path, with_tls) as (a, b):
        create((a, b), tmp_path)
        history = History(31)
        history.write(a, 300)
        goes_on_at(a, b, history)
        history.write(b, 100)
        comes_back(a, b)
        history.write(b, 100)
        goes_on_at(b, a, history)


def refuses(tmp_path, second, why):
    """The volume works without the second node, and a log says what is wrong with that."""
    with both(tmp_path, second) as (a, b):
        backend = f"file:{tmp_path}/v.img"
        a.create("v", "--backend", backend, "--replicas", 2, "--ack", "all", "--nodes", "a,b", size="16M")
        a.tells(why)
        history = History(32)
        history.write(a, 100)
        assert record(a)["members"] == ["a"]
        assert record(a)["joiners"] == ["b"]
        history.check(a)


def test_node_with_a_certificate_of_another_authority_is_refused(tmp_path):
    def foreign(authority):
        other = authority.parent / "other"
        tls_sh(other)
        return certify(other, "b", name_of(2))

    refuses(tmp_path, foreign, "authority has not signed the peer's certificate")


def test_node_with_a_certificate_of_another_name_is_refused(tmp_path):
    refuses(
        tmp_path,
        lambda authority: certify(authority, "b", name_of(3)),
        "the peer's certificate is of another node",
    )


def test_node_without_tls_is_refused(tmp_path):
    def plain(_):
        return {f"cluster.tls_{key}": "" for key in ("certificate", "key", "authority")}

    refuses(tmp_path, plain, "it does not speak TLS")
