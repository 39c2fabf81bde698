"""Homes of volumes in storage mode as files: where in them what is."""

BLOCK = 4096
# The head, and what one page of the map is of.
HEAD_BLOCKS = 8
PAGE_BLOCKS = 16128
# Blocks of a page's checksums, which lie between its two copies and its data; with encryption each has a tag beside it.
PAGE_SUMS_BLOCKS = 126
PAGE_TAGGED_SUMS_BLOCKS = 2 * PAGE_SUMS_BLOCKS
# Where the first checksum is, and the first byte of the volume.
SUMS = (HEAD_BLOCKS + 2) * BLOCK
DATA = SUMS + PAGE_SUMS_BLOCKS * BLOCK
ENCRYPTED_DATA = SUMS + PAGE_TAGGED_SUMS_BLOCKS * BLOCK


def pages(size):
    return -(-size // (PAGE_BLOCKS * BLOCK))


def store_bytes(size, is_encrypted=False):
    """Bytes of the local store of a volume of so many."""
    sums = PAGE_TAGGED_SUMS_BLOCKS if is_encrypted else PAGE_SUMS_BLOCKS
    return size + (HEAD_BLOCKS + pages(size) * (2 + sums)) * BLOCK


def crc32c(data):
    crc = (1 << 32) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ (1 << 32) - 1


def crc64_nvme(data):
    crc = (1 << 64) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ (1 << 64) - 1


def seal(block):
    """Make the checksum of a structure right, which needs no key."""
    block[16:24] = bytes(8)
    block[16:24] = crc64_nvme(block).to_bytes(8, "little")


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
            seal(block)
            file.seek(place)
            file.write(block)
            size = int.from_bytes(block[56:64], "little")
    return size
