"""What a bad command line and a bad configuration get: one clear error and exit status 2."""

import pytest

from daemon import Daemon, hdcs, refused


@pytest.mark.parametrize(
    "name, why",
    [
        ("", "cannot be empty"),
        ("x" * 65, "at most 64 bytes, this one has 65"),
        ("a/b", "this one has '/'"),
        ("..", "cannot start with `.`"),
        (".hidden", "cannot start with `.`"),
        ("a b", "this one has ' '"),
        ("a\nb", "this one has '\\n'"),
        ("a\x1b[2J", "this one has '\\u{1b}'"),
        ("ümlaut", "this one has 'ü'"),
    ],
)
@pytest.mark.parametrize("command", ["create", "show", "delete"])
def test_name_is_refused(tmp_path, command, name, why):
    size = ["--size", "1G"] if command == "create" else []
    done = hdcs("volume", command, name, *size, "--data", tmp_path)
    refused(done, 2, "invalid value", why)
    assert list(tmp_path.iterdir()) == []


def test_name_like_an_option_is_refused(tmp_path):
    refused(hdcs("volume", "create", "--size", "1G", "--data", tmp_path, "--", "-a"), 2,
            "cannot start with `-`")


@pytest.mark.parametrize(
    "size, why",
    [
        ("0", "size zero"),
        ("1000", "a multiple of 512 bytes; 1000 is not (the next one is 1024)"),
        ("512", "at least 4096 bytes"),
        ("2P", "at most 1125899906842624 bytes"),
        ("99999999999999999999G", "too large"),
        ("10GB", "unknown unit `GB`"),
        ("10X", "unknown unit `X`"),
        ("ten", "not a size"),
        ("-1G", "not a size"),
        ("1.5", "not a whole number of bytes"),
        ("", "value"),
    ],
)
def test_size_is_refused(tmp_path, size, why):
    refused(hdcs("volume", "create", "v", f"--size={size}", "--data", tmp_path), 2, why)
    refused(hdcs("volume", "resize", "v", f"--size={size}", "--data", tmp_path), 2, why)
    refused(hdcs("volume", "resize", "--data", tmp_path, "--", "v", size), 2, why)


def test_new_size_is_given_once(tmp_path):
    for size in (["1G"], ["--size", "1G"]):
        refused(hdcs("volume", "resize", "v", *size, "--data", tmp_path), 1, "no daemon is running")
    refused(hdcs("volume", "resize", "v", "--data", tmp_path), 2, "required", "SIZE")
    refused(hdcs("volume", "resize", "v", "1G", "--size", "1G", "--data", tmp_path), 2, "cannot be used with")


@pytest.mark.parametrize(
    "options, parts",
    [
        (["--replicas", "2"], ["--nodes"]),
        (["--replicas", "0"], ["1..=3"]),
        (["--replicas", "1", "--ack", "all"], ["give --replicas 2 or 3"]),
        (["--ack", "all"], ["--replicas"]),
        (["--replicas", "2", "--nodes", "a,b", "--ack", "none"], ["all, majority, one"]),
    ],
)
def test_copies_that_contradict_themselves_are_refused(tmp_path, options, parts):
    done = hdcs("volume", "create", "v", "--size", "1G", *options, "--data", tmp_path)
    refused(done, 2, *parts)


def test_what_never_was_is_refused(tmp_path):
    done = hdcs("volume", "create", "v", "--size", "1G", "--mode", "fast", "--data", tmp_path)
    refused(done, 2, "invalid value 'fast' for '--mode <MODE>'", "cache, storage")


@pytest.mark.parametrize(
    "arguments",
    [["frobnicate"], ["volume", "snapshot", "v"], ["volume", "list", "--frob"], ["volume", "set", "v"]],
)
def test_usage_errors_are_status_2(arguments):
    assert hdcs(*arguments).returncode == 2


def test_without_a_daemon_it_is_said_how_to_start_one(tmp_path):
    for command in (["volume", "list"], ["status"], ["top"], ["volume", "flush", "v"]):
        refused(hdcs(*command, "--data", tmp_path), 1, "no daemon is running",
                f"hdcs serve --data {tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_data_directory_comes_from_the_environment(tmp_path):
    refused(hdcs("volume", "list", env={"HDCS_DATA": str(tmp_path / "e")}), 1, str(tmp_path / "e"))
    refused(hdcs("volume", "list", cwd=tmp_path), 1, "hdcs-data/control.sock")


@pytest.mark.parametrize(
    "text, parts",
    [
        ("memory_max_mb = 512", ["unknown key `memory_max_mb`", "did you mean `memory_max_mib`?"]),
        ("destage_age_max_s = 5", ["did you mean `destage_age_max_ms`?"]),
        ('memory_max_mib = "1G"', ["`memory_max_mib` takes a whole number", 'found "1G"']),
        ("memory_max_mib = 1.5", ["found the fraction 1.5"]),
        ("memory_max_mib = 16", ["from 128 to", "found 16"]),
        ('persist = "sometimes"', ['one of "on-write", "on-flush", "auto"']),
        ("[volumes]", ["unknown key `volumes`"]),
        ("memory_max_mib =", ["is not TOML", "line 1"]),
        ('nbd_listen = ["tcp:0.0.0.0:10809"]', ["without TLS", "nbd_tls_cert_file"]),
        ('nbd_listen = ["tcp:example.org:1"]', ["`nbd_listen` takes a list"]),
        ('metrics_listen = "0.0.0.0:9100"', ["a loopback address"]),
        ("memory_max_mib = 128\nlog_size_mib = 65536", ["MiB are needed", "log_size_mib"]),
        ("dirty_ratio_min = 90", ["must be below dirty_ratio_max"]),
        ("cache_line_kib = 8", ["`cache_line_kib` takes 16, 32 or 64, found 8"]),
        ("cache_total_size_mib = 15", ["0 (no SSD tier) or at least 16, found 15"]),
        ("cache_total_size_mib = 5000000", ["a whole number from 0 to 4194304"]),
        ("shard_processor = 1024", ["from 0 to 1023", "empty: any"]),
        ('log_durability = "sync"', ['one of "measure", "dsync", "fdatasync"']),
    ],
)
def test_config_is_refused(tmp_path, text, parts):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    done = hdcs("serve", "--config", path, "--data", tmp_path / "d")
    refused(done, 2, str(path) if "`memory" in parts[0] else "configuration", *parts)
    assert done.stdout == ""
    assert not (tmp_path / "d").exists()


def test_config_that_is_not_there_is_refused(tmp_path):
    done = hdcs("serve", "--config", tmp_path / "none.toml", "--data", tmp_path / "d")
    refused(done, 2, "cannot read the configuration", "none.toml")


def test_tls_files_that_are_not_there_are_refused(tmp_path):
    config = {"nbd_tls_cert_file": str(tmp_path / "c"), "nbd_tls_key_file": str(tmp_path / "k")}
    Daemon(tmp_path, config).refuses(1, "cannot use the TLS files", str(tmp_path / "c"))
