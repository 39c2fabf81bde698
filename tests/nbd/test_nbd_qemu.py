"""NBD with QEMU's tools."""

import json
import random

from programs import MIB, run

SIZE = 64 * MIB


def qemu_io(volume, *commands):
    """Run qemu-io commands; their output."""
    arguments = [word for command in commands for word in ("-c", command)]
    done = run("qemu-io", "-f", "raw", *arguments, volume)
    output = done.stdout + done.stderr
    assert "failed" not in output and "error" not in output, output
    return output


def test_qemu_img_info(volume):
    info = json.loads(run("qemu-img", "info", "--output=json", volume).stdout)
    assert info["virtual-size"] == SIZE
    assert info["format"] == "raw"


def test_qemu_img_convert_and_compare(server, volume, tmp_path):
    rng = random.Random(1)
    source = tmp_path / "source.raw"
    with open(source, "wb") as file:
        file.truncate(SIZE)
        for _ in range(50):
            file.seek(rng.randrange(SIZE // 512 - 300) * 512)
            file.write(rng.randbytes(rng.randrange(1, 300) * 512))
    run("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", source, volume)
    run("qemu-img", "compare", "-f", "raw", "-F", "raw", source, volume)
    back = tmp_path / "back.qcow2"
    run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", volume, back)
    run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", source, back)
    other = server.uri(server.new_volume(SIZE))
    run("qemu-img", "convert", "-n", "-W", "-m", "16", "-f", "raw", "-O", "raw", volume, other)
    run("qemu-img", "compare", "-f", "raw", "-F", "raw", volume, other)
    run("qemu-io", "-f", "raw", "-c", "write -P 0x77 512 512", other)
    assert run("qemu-img", "compare", volume, other, check=False).returncode == 1


def test_qemu_img_map(volume):
    qemu_io(volume, "write -P 1 8M 1M", "flush")
    rows = json.loads(run("qemu-img", "map", "-f", "raw", "--output=json", volume).stdout)
    assert sum(row["length"] for row in rows) == SIZE
    holder = next(row for row in rows if row["start"] <= 8 * MIB < row["start"] + row["length"])
    assert holder["data"] and not holder["zero"]


def test_qemu_io_patterns(volume):
    qemu_io(
        volume,
        "write -P 0x11 0 1M",
        "write -P 0x22 512 512",
        "read -P 0x11 0 512",
        "read -P 0x22 512 512",
        "read -P 0x11 1024 1047552",
        "write -f -P 0x33 1M 64k",
        "read -P 0x33 1M 64k",
        "write -z 4096 4096",
        "read -P 0 4096 4096",
        "write -z -u 64k 64k",
        "read -P 0 64k 64k",
        "discard 128k 128k",
        "read -P 0 128k 128k",
        "read -P 0x11 8192 4096",
        "flush",
        "write -P 0x44 31M 32M",
        "read -P 0x44 31M 32M",
    )


def test_qemu_io_in_parallel(volume):
    writes = [f"aio_write -q -P {number} {number}M 1M" for number in range(1, 33)]
    reads = [f"read -q -P {number} {number}M 1M" for number in range(1, 33)]
    qemu_io(volume, *writes, "aio_flush", *reads)


def test_qemu_img_bench_runs(volume):
    for options in [["-w", "--flush-interval=32"], []]:
        run("qemu-img", "bench", "-f", "raw", "-d", "32", "-c", "4000", "-t", "none", *options, volume)
