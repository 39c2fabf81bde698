"""Fixtures of the black-box suite: one daemon for the tests of a file, and volumes on it.

The suite tests the programs in `target/checked`, or those in HDCS_BUILT, such as `target/release`. What tests share
is in `lib/`; a folder holds the tests of an area.

Every wait has a limit. A test that runs into it loses its daemon, so that it fails instead of hanging; whatever a
test starts ends with it.
"""

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from daemon import Daemon
from programs import ROOT, run

# Fixtures of their own files.
pytest_plugins = ["ceph_cluster", "disks", "object_stores", "removed_cases"]

TEST_SECONDS = 240

# A real store that the tests of several files share is in their names. These take longest, so they begin first.
STORES = ("s3", "rbd", "hdfs")

# Small enough that tests overrun every part of it.
CONFIG = {
    "memory_max_mib": 1040,
    # The volumes of all tests of a file are open at once.
    "volumes_memory_mib": 600,
    "log_size_mib": 32,
    "cache_total_size_mib": 64,
}


@pytest.fixture(scope="module")
def module_daemon():
    """One daemon for the tests of a module."""
    with tempfile.TemporaryDirectory(prefix="hdcs-test-") as home, Daemon(home, CONFIG) as daemon:
        yield daemon
        daemon.stop()


@pytest.fixture
def server(module_daemon):
    """The module's daemon, running, with a limit on the test's time."""
    if module_daemon.process.poll() is not None:
        module_daemon.start()
    limit = threading.Timer(TEST_SECONDS, module_daemon.process.kill)
    limit.start()
    yield module_daemon
    limit.cancel()
    status = module_daemon.process.poll()
    assert status is None, f"the daemon ended with {status}\n{module_daemon.log()}"


@pytest.fixture
def volume(server):
    """URI of a new volume of 64 MiB."""
    return server.uri(server.new_volume())


@pytest.fixture(scope="session")
def certificates():
    """Directory of a certificate authority with a server's and a client's certificate."""
    with tempfile.TemporaryDirectory(prefix="hdcs-tls-") as directory:
        run(ROOT / "testenv/tls.sh", directory)
        yield Path(directory)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """With several workers, a file's tests run on one, and so do the files that share a real store."""
    groups = {item: group_of(item.path.stem) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: STORES.index(groups[item]) if groups[item] in STORES else len(STORES))


def group_of(name):
    """What the tests of a file run one after the other with: those that share its store, or just each other."""
    if "lying" in name:
        return name
    return next((store for store in STORES if store in name), name)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """What a test that passed has left on the disk goes at once: all of them together would take some 40 GB."""
    report = (yield).get_result()
    if report.when == "call":
        item.has_passed = report.passed
    directory = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "teardown" and directory and report.passed and getattr(item, "has_passed", False):
        # The directory itself stays: another test of the same name would get it, and some name volumes by it.
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A run in which everything passed leaves nothing on the disk."""
    if exitstatus == 0 and "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(session.config._tmp_path_factory.getbasetemp(), ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """A failure is told at once: a run that is cut short would keep it to itself."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed in its {report.when}:\n{report.longreprtext}", flush=True)
