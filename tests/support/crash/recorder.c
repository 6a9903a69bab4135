/* Records the file calls of a process, those of Lance too: LD_PRELOAD=recorder.so RECORD=file.
 *
 * One line per call, in the order in which the calls returned:
 *   number <tab> call <tab> inode <tab> bytes <tab> path <newline>
 * A sync is recorded when it begins, since it need not cover what is written while it runs.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int log_fd = -1;
static long number = 0;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("RECORD");
    if (path) log_fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND, 0600);
}

static void note(const char *call, unsigned long inode, long bytes, const char *path) {
    char line[PATH_MAX + 128];
    if (log_fd < 0) return;
    long mine = __atomic_add_fetch(&number, 1, __ATOMIC_SEQ_CST);
    int length =
        snprintf(line, sizeof line, "%ld\t%s\t%lu\t%ld\t%s\n", mine, call, inode, bytes, path);
    if (length > 0) syscall(SYS_write, log_fd, line, (size_t)length);
}

static void note_fd(const char *call, int fd, long bytes) {
    struct stat st;
    char link[64], path[PATH_MAX];
    if (log_fd < 0 || fstat(fd, &st) != 0) return;
    if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    note(call, (unsigned long)st.st_ino, bytes, path);
}

static void note_path(const char *call, const char *path) {
    struct stat st;
    if (log_fd < 0 || lstat(path, &st) != 0) return;
    note(call, (unsigned long)st.st_ino, 0, path);
}

#define REAL(type, name, ...)                        \
    static type (*real)(__VA_ARGS__) = NULL;         \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPENED(fd, flags) \
    if ((fd) >= 0 && ((flags) & (O_CREAT | O_TRUNC))) note_fd("create", (fd), 0)

static mode_t mode_of(int flags, va_list args) {
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? (mode_t)va_arg(args, int) : 0;
}

#define OPEN(function)                                          \
    int function(const char *path, int flags, ...) {            \
        REAL(int, #function, const char *, int, ...);           \
        va_list args;                                           \
        va_start(args, flags);                                  \
        mode_t mode = mode_of(flags, args);                     \
        va_end(args);                                           \
        int fd = real(path, flags, mode);                       \
        OPENED(fd, flags);                                      \
        return fd;                                              \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function)                                        \
    int function(int at, const char *path, int flags, ...) {    \
        REAL(int, #function, int, const char *, int, ...);      \
        va_list args;                                           \
        va_start(args, flags);                                  \
        mode_t mode = mode_of(flags, args);                     \
        va_end(args);                                           \
        int fd = real(at, path, flags, mode);                   \
        OPENED(fd, flags);                                      \
        return fd;                                              \
    }
OPENAT(openat)
OPENAT(openat64)

#define WRITE(function, parameters, types, ...)                 \
    ssize_t function parameters {                               \
        static ssize_t(*real) types = NULL;                     \
        if (!real) real = (ssize_t(*) types)dlsym(RTLD_NEXT, #function); \
        ssize_t done = real(__VA_ARGS__);                       \
        if (done > 0) note_fd("write", fd, done);               \
        return done;                                            \
    }
WRITE(write, (int fd, const void *data, size_t size), (int, const void *, size_t), fd, data, size)
WRITE(pwrite, (int fd, const void *data, size_t size, off_t at),
      (int, const void *, size_t, off_t), fd, data, size, at)
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t at),
      (int, const void *, size_t, off64_t), fd, data, size, at)
WRITE(writev, (int fd, const struct iovec *parts, int count), (int, const struct iovec *, int),
      fd, parts, count)
WRITE(pwritev, (int fd, const struct iovec *parts, int count, off_t at),
      (int, const struct iovec *, int, off_t), fd, parts, count, at)

int fsync(int fd) {
    REAL(int, "fsync", int);
    note_fd("sync", fd, 0);
    return real(fd);
}

int fdatasync(int fd) {
    REAL(int, "fdatasync", int);
    note_fd("sync", fd, 0);
    return real(fd);
}

int ftruncate(int fd, off_t size) {
    REAL(int, "ftruncate", int, off_t);
    int failed = real(fd, size);
    if (!failed) note_fd("write", fd, 0);
    return failed;
}

int ftruncate64(int fd, off64_t size) {
    REAL(int, "ftruncate64", int, off64_t);
    int failed = real(fd, size);
    if (!failed) note_fd("write", fd, 0);
    return failed;
}

int rename(const char *old, const char *new) {
    REAL(int, "rename", const char *, const char *);
    int failed = real(old, new);
    if (!failed) note_path("name", new);
    return failed;
}

int renameat(int old_at, const char *old, int new_at, const char *new) {
    REAL(int, "renameat", int, const char *, int, const char *);
    int failed = real(old_at, old, new_at, new);
    if (!failed) note_path("name", new);
    return failed;
}

int link(const char *old, const char *new) {
    REAL(int, "link", const char *, const char *);
    int failed = real(old, new);
    if (!failed) note_path("name", new);
    return failed;
}

int linkat(int old_at, const char *old, int new_at, const char *new, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    int failed = real(old_at, old, new_at, new, flags);
    if (!failed) note_path("name", new);
    return failed;
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    int failed = real(path, mode);
    if (!failed) note_path("name", path);
    return failed;
}
