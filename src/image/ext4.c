/*
 * The disk: mke2fs fills an ext4 image from the tree, in alphabetical order and with fixed identities. It copies the
 * times of change and access of the files it reads, which are those of the build and cannot be set on them; so a pass
 * over all inodes afterwards makes every time the time of modification.
 */
#include <errno.h>
#include <ext2fs/ext2fs.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/text.h"
#include "image/build.h"

#define MKE2FS_TIMEOUT_S 1800
/* Of all images alike: they never meet on one machine but as somebody's only disk. */
#define UUID "5350ace0-0000-4000-8000-000000000001"
#define HASH_SEED "5350ace0-0000-4000-8000-000000000002"
#define JOURNAL_MIB "16"
#define INODE_BYTES_MAX 4096

static int make(struct image_build *b, struct error *e)
{
	/* prezeroed: the image is a new sparse file, writing zeros would only fill it. */
	static const char *const argv_head[] = {
	    "mke2fs",
	    "-q",
	    "-F",
	    "-t",
	    "ext4",
	    "-b",
	    "4096",
	    "-m",
	    "1",
	    "-L",
	    "space",
	    "-U",
	    UUID,
	    "-J",
	    "size=" JOURNAL_MIB,
	    "-E",
	    "hash_seed=" HASH_SEED ",lazy_itable_init=0,lazy_journal_init=0,assume_storage_prezeroed=1,root_owner=0:0"};
	const char *argv[ARRAY_SIZE(argv_head) + 4];
	struct subprocess p = {
	    .argv = argv, .environment = b->environment, .inherit_fd = b->spec->disk_fd, .timeout_s = MKE2FS_TIMEOUT_S};
	char size[32];
	int r;

	memcpy(argv, argv_head, sizeof(argv_head));
	argv[ARRAY_SIZE(argv_head)] = "-d";
	argv[ARRAY_SIZE(argv_head) + 1] = b->root;
	argv[ARRAY_SIZE(argv_head) + 2] = "/proc/self/fd/3";
	argv[ARRAY_SIZE(argv_head) + 3] = NULL;
	if (ftruncate(b->spec->disk_fd, 0) < 0 || ftruncate(b->spec->disk_fd, (off_t)b->spec->size_bytes) < 0)
		return error_set_errno(e, errno, "size the disk");
	text_format_size(size, sizeof(size), b->spec->size_bytes);
	r = subprocess_run(&p, e);
	return r < 0 ? error_prefix(e, "fill a disk of %s (too small for the packages?)", size) : 0;
}

static int settle_inode(ext2_filsys fs, ext2_ino_t number, struct ext2_inode_large *inode, int size)
{
	if (!inode->i_links_count && number != EXT2_RESIZE_INO && number != EXT2_JOURNAL_INO)
		return 0;
	inode->i_atime = inode->i_ctime = inode->i_mtime;
	if (size > EXT2_GOOD_OLD_INODE_SIZE && inode->i_extra_isize >= sizeof(*inode) - EXT2_GOOD_OLD_INODE_SIZE - 8) {
		inode->i_crtime = inode->i_mtime;
		inode->i_ctime_extra = inode->i_mtime_extra = inode->i_atime_extra = inode->i_crtime_extra = 0;
	}
	return (int)ext2fs_write_inode_full(fs, number, (struct ext2_inode *)inode, size);
}

static int settle(ext2_filsys fs)
{
	union {
		struct ext2_inode_large inode;
		char space[INODE_BYTES_MAX];
	} u;
	int size = EXT2_INODE_SIZE(fs->super);
	ext2_inode_scan scan;
	ext2_ino_t number;
	errcode_t failed;

	if (size > INODE_BYTES_MAX)
		return EXT2_ET_BAD_INODE_NUM;
	fs->now = IMAGE_EPOCH;
	failed = ext2fs_open_inode_scan(fs, 0, &scan);
	if (failed)
		return (int)failed;
	do {
		failed = ext2fs_get_next_inode_full(scan, &number, (struct ext2_inode *)&u.inode, size);
		if (!failed && number)
			failed = settle_inode(fs, number, &u.inode, size);
	} while (!failed && number);
	ext2fs_close_inode_scan(scan);
	return (int)failed;
}

int ext4_write(struct image_build *b, struct error *e)
{
	char path[32];
	ext2_filsys fs;
	errcode_t failed;
	int r = build_say(b, e, "disk: write the file system");

	if (r == 0)
		r = make(b, e);
	if (r < 0)
		return r;
	(void)text_format(path, sizeof(path), "/proc/self/fd/%d", b->spec->disk_fd);
	failed = ext2fs_open(path, EXT2_FLAG_RW | EXT2_FLAG_64BITS, 0, 0, unix_io_manager, &fs);
	if (failed)
		return error_set(e, ERROR_INTERNAL, "open the new file system (libext2fs error %ld)", (long)failed);
	failed = settle(fs);
	if (failed) {
		ext2fs_free(fs);
		return error_set(e, ERROR_INTERNAL, "set the times of the new file system (libext2fs error %ld)", (long)failed);
	}
	failed = ext2fs_close_free(&fs);
	return failed ? error_set(e, ERROR_INTERNAL, "write the new file system (libext2fs error %ld)", (long)failed) : 0;
}
