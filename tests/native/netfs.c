// For LD_PRELOAD: refuse what some network and FUSE drives refuse. Letters in NETFS select the calls:
//   l flock   h hard links   c chmod   s fsync   v statvfs has no sizes   m mmap of GGUF files, p of partial ones
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static int refuses(char letter, int error) {
    const char * letters = getenv("NETFS");
    if (!letters || !strchr(letters, letter)) {
        return 0;
    }
    errno = error;
    return 1;
}

#define NEXT(name, ...) ((int (*)(__VA_ARGS__)) dlsym(RTLD_NEXT, name))

int flock(int fd, int operation) {
    return refuses('l', ENOLCK) ? -1 : NEXT("flock", int, int)(fd, operation);
}

int link(const char * source, const char * target) {
    return refuses('h', EPERM) ? -1 : NEXT("link", const char *, const char *)(source, target);
}

int linkat(int from_dir, const char * source, int to_dir, const char * target, int flags) {
    return refuses('h', EOPNOTSUPP) ? -1 : NEXT("linkat", int, const char *, int, const char *, int)(from_dir, source, to_dir, target, flags);
}

int chmod(const char * path, mode_t mode) {
    return refuses('c', EPERM) ? -1 : NEXT("chmod", const char *, mode_t)(path, mode);
}

int fsync(int fd) {
    return refuses('s', EINVAL) ? -1 : NEXT("fsync", int)(fd);
}

static int clear_sizes(int result, struct statvfs * info) {
    if (refuses('v', 0)) {
        info->f_bavail = info->f_bfree = info->f_blocks = 0;
    }
    return result;
}

int statvfs(const char * path, struct statvfs * info) {
    return clear_sizes(NEXT("statvfs", const char *, struct statvfs *)(path, info), info);
}

int fstatvfs(int fd, struct statvfs * info) {
    return clear_sizes(NEXT("fstatvfs", int, struct statvfs *)(fd, info), info);
}

// the same structs on systems that always count files in 64 bits
int statvfs64(const char * path, struct statvfs64 * info) {
    return statvfs(path, (struct statvfs *) info);
}

int fstatvfs64(int fd, struct statvfs64 * info) {
    return fstatvfs(fd, (struct statvfs *) info);
}

static int refuses_to_map(int fd) {
    char link[64], name[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n = fd < 0 ? -1 : readlink(link, name, sizeof(name) - 1);
    name[n < 0 ? 0 : n] = 0;
    return (strstr(name, ".gguf") && refuses('m', ENODEV)) || (strstr(name, ".partial") && refuses('p', ENODEV));
}

void * mmap(void * address, size_t n_bytes, int protection, int flags, int fd, off_t offset) {
    static void * (*next)(void *, size_t, int, int, int, off_t);
    if (!next) {
        next = (void * (*)(void *, size_t, int, int, int, off_t)) dlsym(RTLD_NEXT, "mmap");
    }
    return refuses_to_map(fd) ? MAP_FAILED : next(address, n_bytes, protection, flags, fd, offset);
}

void * mmap64(void * address, size_t n_bytes, int protection, int flags, int fd, off64_t offset) {
    return mmap(address, n_bytes, protection, flags, fd, offset);
}
