/* Makes system calls of a process fail or slow, and shifts its clock. Works for Lance too:
 * LD_PRELOAD=injector.so TORTURE_ROOT=folder TORTURE_CONTROL=file.
 *
 * Only calls on files below the folder are affected. The control file is memory-mapped, so that any
 * process can change the faults at any time (see injector.py).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { COUNTDOWN, CODE, LASTING, CALLS, DELAY, CLOCK, FIRED, FIELDS };
enum { WRITE = 1, SYNC = 2, OPEN = 4, NAME = 8, READ = 16 };

static volatile long *control = NULL;
static const char *root = NULL;
static size_t root_length = 0;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("TORTURE_CONTROL");
    root = getenv("TORTURE_ROOT");
    if (!path || !root) return;
    root_length = strlen(root);
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR);
    if (fd < 0) return;
    void *mapped = mmap(NULL, FIELDS * sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (mapped != MAP_FAILED) control = mapped;
}

static int should_fail(int call, const char *path) {
    if (!control || strncmp(path, root, root_length) != 0) return 0;
    long delay = control[DELAY];
    if (delay > 0) {
        struct timespec pause = {delay / 1000000, delay % 1000000 * 1000};
        syscall(SYS_nanosleep, &pause, NULL);
    }
    if (control[COUNTDOWN] < 0 || !(control[CALLS] & call)) return 0;
    long left = __atomic_fetch_sub(&control[COUNTDOWN], 1, __ATOMIC_SEQ_CST);
    if (left > 0) return 0;
    int fires = left == 0 || control[LASTING];
    __atomic_store_n(&control[COUNTDOWN], control[LASTING] ? 0 : -1, __ATOMIC_SEQ_CST);
    if (fires) __atomic_add_fetch(&control[FIRED], 1, __ATOMIC_SEQ_CST);
    return fires;
}

static int should_fail_fd(int call, int fd) {
    char link[64], path[PATH_MAX];
    if (!control || (control[DELAY] <= 0 && control[COUNTDOWN] < 0)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return should_fail(call, path);
}

#define FAIL return (errno = (int)control[CODE], -1)
#define REAL(type, name, ...)                \
    static type (*real)(__VA_ARGS__) = NULL; \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static mode_t mode_of(int flags, va_list args) {
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? (mode_t)va_arg(args, int) : 0;
}

static int open_calls(int flags) { return flags & O_CREAT ? OPEN | NAME : OPEN; }

#define OPEN_CALL(function)                                          \
    int function(const char *path, int flags, ...) {                 \
        REAL(int, #function, const char *, int, ...);                \
        va_list args;                                                \
        va_start(args, flags);                                       \
        mode_t mode = mode_of(flags, args);                          \
        va_end(args);                                                \
        if (should_fail(open_calls(flags), path)) FAIL;                      \
        return real(path, flags, mode);                              \
    }
OPEN_CALL(open)
OPEN_CALL(open64)

#define OPENAT_CALL(function)                                        \
    int function(int at, const char *path, int flags, ...) {         \
        REAL(int, #function, int, const char *, int, ...);           \
        va_list args;                                                \
        va_start(args, flags);                                       \
        mode_t mode = mode_of(flags, args);                          \
        va_end(args);                                                \
        if (should_fail(open_calls(flags), path)) FAIL;                      \
        return real(at, path, flags, mode);                          \
    }
OPENAT_CALL(openat)
OPENAT_CALL(openat64)

/* A failed write has written half of its bytes. */
ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (should_fail_fd(WRITE, fd)) {
        real(fd, data, size / 2);
        FAIL;
    }
    return real(fd, data, size);
}

#define TRANSFER(function, call, parameters, types, ...)                      \
    ssize_t function parameters {                                             \
        static ssize_t(*real) types = NULL;                                   \
        if (!real) real = (ssize_t(*) types)dlsym(RTLD_NEXT, #function);      \
        if (should_fail_fd(call, fd)) FAIL;                                        \
        return real(__VA_ARGS__);                                             \
    }
TRANSFER(pwrite, WRITE, (int fd, const void *data, size_t size, off_t at),
         (int, const void *, size_t, off_t), fd, data, size, at)
TRANSFER(pwrite64, WRITE, (int fd, const void *data, size_t size, off64_t at),
         (int, const void *, size_t, off64_t), fd, data, size, at)
TRANSFER(writev, WRITE, (int fd, const struct iovec *parts, int count),
         (int, const struct iovec *, int), fd, parts, count)
TRANSFER(read, READ, (int fd, void *data, size_t size), (int, void *, size_t), fd, data, size)
TRANSFER(pread, READ, (int fd, void *data, size_t size, off_t at),
         (int, void *, size_t, off_t), fd, data, size, at)
TRANSFER(pread64, READ, (int fd, void *data, size_t size, off64_t at),
         (int, void *, size_t, off64_t), fd, data, size, at)

#define SYNC_CALL(function)                  \
    int function(int fd) {                   \
        REAL(int, #function, int);           \
        if (should_fail_fd(SYNC, fd)) FAIL;       \
        return real(fd);                     \
    }
SYNC_CALL(fsync)
SYNC_CALL(fdatasync)

int rename(const char *old, const char *new) {
    REAL(int, "rename", const char *, const char *);
    if (should_fail(NAME, new)) FAIL;
    return real(old, new);
}

int link(const char *old, const char *new) {
    REAL(int, "link", const char *, const char *);
    if (should_fail(NAME, new)) FAIL;
    return real(old, new);
}

int linkat(int old_at, const char *old, int new_at, const char *new, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    if (should_fail(NAME, new)) FAIL;
    return real(old_at, old, new_at, new, flags);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    if (should_fail(NAME, path)) FAIL;
    return real(path, mode);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int failed = real(clock, now);
    if (!failed && control && clock == CLOCK_REALTIME) now->tv_sec += control[CLOCK];
    return failed;
}
