"""Homes of volumes in storage mode as files: where in them what is."""

BLOCK = 4096
# The head, and what one page of the map is of.
HEAD_BLOCKS = 8
PAGE_BLOCKS = 16128
# Blocks of a page's checksums, which lie between its two copies and its data.
PAGE_SUMS_BLOCKS = 126
# Where the first byte of the volume is.
DATA = (HEAD_BLOCKS + 2 + PAGE_SUMS_BLOCKS) * BLOCK


def pages(size):
    return -(-size // (PAGE_BLOCKS * BLOCK))


def store_bytes(size):
    """Bytes of the home of a volume of so many."""
    return size + (HEAD_BLOCKS + pages(size) * (2 + PAGE_SUMS_BLOCKS)) * BLOCK


def crc64_nvme(data):
    crc = (1 << 64) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ (1 << 64) - 1


def change_superblocks(path, change):
    """Have both superblocks, as far as they were written, changed and sealed; the size in the last one."""
    size = None
    with open(path, "r+b") as file:
        for place in (0, BLOCK):
            file.seek(place)
            block = bytearray(file.read(BLOCK))
            if block[:8] != b"HDCSHOME":
                continue
            change(block)
            block[16:24] = bytes(8)
            block[16:24] = crc64_nvme(block).to_bytes(8, "little")
            file.seek(place)
            file.write(block)
            size = int.from_bytes(block[56:64], "little")
    return size
