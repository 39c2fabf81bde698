/* nbdkit plugin "power": a disk with a volatile write cache, for power-failure tests.
 *
 *   nbdkit -U SOCKET nbdkit-power.so disk=IMAGE [keep=PERCENT] [seed=N] [mode=random|prefix] [atom=512]
 *
 * Writes are seen by reads at once but reach IMAGE only at FLUSH (or with FUA). Those that are not
 * flushed are kept in IMAGE.volatile. SIGKILL is the power failure; the next start decides what of
 * them had reached the medium: each sector of ATOM bytes with a probability of PERCENT (random: torn
 * and reordered writes), or a random prefix of the writes (prefix). FUA writes always had.
 *
 * The same seed and the same writes give the same failure. What a flush made durable is never lost.
 */
#define _GNU_SOURCE
#define NBDKIT_API_VERSION 2
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <nbdkit-plugin.h>

#define THREAD_MODEL NBDKIT_THREAD_MODEL_SERIALIZE_ALL_REQUESTS
#define SECTOR 512

/* Configuration. */
static char *disk;
static int keep_percent;
static int prefix_mode;
static unsigned atom = SECTOR;
static long seed = 1;

static int image = -1;    /* the medium */
static int journal = -1;  /* IMAGE.volatile: writes since the last flush, in order */
static int current = -1;  /* what reads see of the sectors marked in `dirty` */
static int64_t size;
static uint8_t *dirty;    /* one bit for each sector */

/* One write in the journal, followed by its data. */
struct record {
	uint64_t offset;
	uint32_t length;
	uint32_t fua;
};

static int
power_config (const char *key, const char *value)
{
	if (!strcmp (key, "disk"))
		disk = nbdkit_absolute_path (value);
	else if (!strcmp (key, "keep"))
		keep_percent = atoi (value);
	else if (!strcmp (key, "seed"))
		seed = atol (value);
	else if (!strcmp (key, "atom"))
		atom = atoi (value);
	else if (!strcmp (key, "mode"))
		prefix_mode = value[0] == 'p';
	else {
		nbdkit_error ("unknown parameter %s", key);
		return -1;
	}
	if (atom == 0 || atom % SECTOR) {
		nbdkit_error ("atom= must be a multiple of %d", SECTOR);
		return -1;
	}
	return 0;
}

/* Read or write all of it. */
static int
transfer (int writing, int fd, void *buffer, size_t length, off_t offset)
{
	char *at = buffer;

	while (length > 0) {
		ssize_t n = writing ? pwrite (fd, at, length, offset)
		                    : pread (fd, at, length, offset);
		if (n <= 0) {
			if (n == 0)
				errno = EIO;
			nbdkit_set_error (errno);
			return -1;
		}
		at += n;
		offset += n;
		length -= n;
	}
	return 0;
}

static long
count_records (void)
{
	struct record r;
	long count = 0;

	for (off_t at = 0; pread (journal, &r, sizeof r, at) == sizeof r; at += sizeof r + r.length)
		count++;
	return count;
}

/* Move the journal to the medium: all of it (flush), or the part that a power failure leaves. */
static int
drain (int after_failure)
{
	struct record r;
	char *data = NULL;
	long writes = 0, kept = 0, lost = 0, cut = 0;
	int result = -1;

	if (after_failure && prefix_mode) {
		long count = count_records ();
		cut = count ? lrand48 () % (count + 1) : 0;
	}
	for (off_t at = 0; pread (journal, &r, sizeof r, at) == sizeof r;
	     at += sizeof r + r.length, writes++) {
		char *grown = realloc (data, r.length);
		if (grown == NULL)
			goto out;
		data = grown;
		/* A short record is the write that the failure interrupted: it never happened. */
		if (pread (journal, data, r.length, at + sizeof r) != r.length)
			break;
		for (uint32_t i = 0; i < r.length; i += atom) {
			uint32_t n = r.length - i < atom ? r.length - i : atom;
			if (after_failure && !r.fua &&
			    (prefix_mode ? writes >= cut : drand48 () * 100 >= keep_percent)) {
				lost++;
				continue;
			}
			if (transfer (1, image, data + i, n, r.offset + i) == -1)
				goto out;
			kept++;
		}
	}
	if (after_failure && writes)
		fprintf (stderr, "power: %ld unflushed writes, %ld sectors kept, %ld lost\n",
		         writes, kept, lost);
	if (ftruncate (journal, 0) == 0 && lseek (journal, 0, SEEK_SET) == 0)
		result = 0;
out:
	free (data);
	return result;
}

static int
power_get_ready (void)
{
	char path[4096];
	struct stat st;

	srand48 (seed);
	if (disk == NULL || (image = open (disk, O_RDWR | O_CLOEXEC)) == -1 ||
	    fstat (image, &st) == -1) {
		nbdkit_error ("disk=: %m");
		return -1;
	}
	size = st.st_size;
	snprintf (path, sizeof path, "%s.volatile", disk);
	journal = open (path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
	snprintf (path, sizeof path, "%s.current", disk);
	current = open (path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	unlink (path);
	dirty = calloc (size / SECTOR / 8 + 1, 1);
	if (journal == -1 || current == -1 || dirty == NULL || ftruncate (current, size) == -1) {
		nbdkit_error ("%s: %m", path);
		return -1;
	}
	return drain (1);
}

static void *
power_open (int readonly)
{
	(void) readonly;
	return NBDKIT_HANDLE_NOT_NEEDED;
}

static int64_t
power_get_size (void *handle)
{
	(void) handle;
	return size;
}

static int
yes (void *handle)
{
	(void) handle;
	return 1;
}

static int
power_can_fua (void *handle)
{
	(void) handle;
	return NBDKIT_FUA_NATIVE;
}

static int
power_block_size (void *handle, uint32_t *minimum, uint32_t *preferred, uint32_t *maximum)
{
	(void) handle;
	*minimum = SECTOR;
	*preferred = 4096;
	*maximum = 32 << 20;
	return 0;
}

static int
is_dirty (uint64_t sector)
{
	return dirty[sector / 8] >> (sector % 8) & 1;
}

static int
power_pread (void *handle, void *buffer, uint32_t length, uint64_t offset, uint32_t flags)
{
	(void) handle;
	(void) flags;
	/* Runs of sectors that are alike, from the cache or from the medium. */
	for (uint32_t begin = 0, end; begin < length; begin = end) {
		int cached = is_dirty ((offset + begin) / SECTOR);
		for (end = begin; end < length && is_dirty ((offset + end) / SECTOR) == cached; end += SECTOR)
			;
		if (end > length)
			end = length;
		if (transfer (0, cached ? current : image, (char *) buffer + begin, end - begin,
		              offset + begin) == -1)
			return -1;
	}
	return 0;
}

static int
power_pwrite (void *handle, const void *buffer, uint32_t length, uint64_t offset, uint32_t flags)
{
	struct record r = {offset, length, !!(flags & NBDKIT_FLAG_FUA)};
	struct iovec parts[2] = {{&r, sizeof r}, {(void *) buffer, length}};

	(void) handle;
	if (transfer (1, current, (void *) buffer, length, offset) == -1)
		return -1;
	for (uint64_t s = offset / SECTOR; s < (offset + length) / SECTOR; s++)
		dirty[s / 8] |= 1 << s % 8;
	if (pwritev (journal, parts, 2, lseek (journal, 0, SEEK_END)) != (ssize_t) (sizeof r + length)) {
		nbdkit_set_error (ENOSPC);
		return -1;
	}
	return 0;
}

static int
power_flush (void *handle, uint32_t flags)
{
	(void) handle;
	(void) flags;
	if (drain (0) == -1)
		return -1;
	memset (dirty, 0, size / SECTOR / 8 + 1);
	/* Give the cache's space back. */
	return ftruncate (current, 0) == 0 && ftruncate (current, size) == 0 ? 0 : -1;
}

static struct nbdkit_plugin plugin = {
	.name = "power",
	.config = power_config,
	.get_ready = power_get_ready,
	.open = power_open,
	.get_size = power_get_size,
	.can_write = yes,
	.can_flush = yes,
	.can_fua = power_can_fua,
	.can_multi_conn = yes,
	.block_size = power_block_size,
	.pread = power_pread,
	.pwrite = power_pwrite,
	.flush = power_flush,
};
NBDKIT_REGISTER_PLUGIN (plugin)
