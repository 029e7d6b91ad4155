#define _GNU_SOURCE
#include <dlfcn.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static long at, seen, allocation, allocated;
static size_t least;
static int code, lasting;

/* The at-th call fails with this error; where it is lasting, all later ones, too. */
void faults_arm(const char *where, long number, int error, int is_lasting) {
    snprintf(folder, sizeof folder, "%s", where);
    at = number; seen = 0; code = error; lasting = is_lasting;
}
long faults_end(void) { long calls = seen; at = 0; return calls; }
void faults_arm_memory(long number, size_t size) {
    least = size; allocated = 0; allocation = number;
}
long faults_end_memory(void) { long calls = allocated; allocation = 0; return calls; }

static int named(const char *path) {
    return at && path && !strncmp(path, folder, strlen(folder));
}
static int described(int descriptor) {
    char name[64], path[4096];
    long length;
    if (!at) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    length = syscall(SYS_readlink, name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return named(path);
}
static int fails(void) {
    seen++;
    if (seen == at || (lasting && seen > at)) { errno = code; return 1; }
    return 0;
}
#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))
#define CALL(type, name, takes, concerns, gives) \
    type name takes { \
        static __typeof__(&name) real; \
        if (!real) real = REAL(name); \
        if ((concerns) && fails()) return -1; \
        return real gives; \
    }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        static __typeof__(&name) real; \
        va_list rest; va_start(rest, flags); \
        mode_t mode = va_arg(rest, int); va_end(rest); \
        if (!real) real = REAL(name); \
        return named(path) && fails() ? -1 : real(path, flags, mode); \
    }
OPEN(open) OPEN(open64)
CALL(ssize_t, read, (int f, void *b, size_t n), described(f), (f, b, n))
CALL(ssize_t, pread64, (int f, void *b, size_t n, off64_t o), described(f), (f, b, n, o))
typedef const struct iovec *Pieces;
CALL(ssize_t, preadv64, (int f, Pieces v, int n, off64_t o), described(f), (f, v, n, o))
CALL(ssize_t, preadv64v2, (int f, Pieces v, int n, off64_t o, int g), described(f), (f, v, n, o, g))
CALL(ssize_t, write, (int f, const void *b, size_t n), described(f), (f, b, n))
CALL(ssize_t, writev, (int f, Pieces v, int n), described(f), (f, v, n))
CALL(int, fsync, (int f), described(f), (f))
CALL(int, fdatasync, (int f), described(f), (f))
CALL(int, flock, (int f, int o), described(f), (f, o))
CALL(int, fchmod, (int f, mode_t m), described(f), (f, m))
CALL(int, chmod, (const char *p, mode_t m), named(p), (p, m))
CALL(int, fchmodat, (int d, const char *p, mode_t m, int g), named(p), (d, p, m, g))
CALL(int, rename, (const char *a, const char *b), named(a), (a, b))
CALL(int, renameat, (int c, const char *a, int d, const char *b), named(a), (c, a, d, b))
CALL(int, unlink, (const char *p), named(p), (p))
CALL(int, unlinkat, (int d, const char *p, int g), named(p), (d, p, g))
CALL(int, mkdir, (const char *p, mode_t m), named(p), (p, m))
CALL(int, access, (const char *p, int m), named(p), (p, m))
CALL(int, faccessat, (int d, const char *p, int m, int g), named(p), (d, p, m, g))
CALL(int, stat64, (const char *p, struct stat64 *s), named(p), (p, s))
CALL(int, lstat64, (const char *p, struct stat64 *s), named(p), (p, s))
CALL(int, fstat64, (int f, struct stat64 *s), described(f), (f, s))
CALL(int, fstatat64, (int d, const char *p, struct stat64 *s, int g), named(p), (d, p, s, g))
CALL(int, stat, (const char *p, struct stat *s), named(p), (p, s))
CALL(int, lstat, (const char *p, struct stat *s), named(p), (p, s))
CALL(int, fstat, (int f, struct stat *s), described(f), (f, s))
CALL(ssize_t, readlink, (const char *p, char *b, size_t n), named(p), (p, b, n))
DIR *opendir(const char *path) {
    static DIR *(*real)(const char *);
    if (!real) real = REAL(opendir);
    return named(path) && fails() ? NULL : real(path);
}
int close(int descriptor) {  /* it is closed in any case, as on Linux */
    int failed = described(descriptor) && fails(), kept = errno;
    int closed = syscall(SYS_close, descriptor);
    if (failed) { errno = kept; return -1; }
    return closed;
}

/* Allocations of a size and more: those of arrays and buffers, not of every object. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
static int refused(size_t size) {
    if (!allocation || size < least) return 0;
    allocated++;
    if (allocated != allocation) return 0;
    errno = ENOMEM;
    return 1;
}
void *malloc(size_t size) { return refused(size) ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return refused(n * size) ? NULL : __libc_calloc(n, size); }
void *realloc(void *old, size_t size) { return refused(size) ? NULL : __libc_realloc(old, size); }
int posix_memalign(void **found, size_t by, size_t size) {
    if (refused(size)) return ENOMEM;
    return (*found = __libc_memalign(by, size)) ? 0 : ENOMEM;
}
void *aligned_alloc(size_t by, size_t size) {
    return refused(size) ? NULL : __libc_memalign(by, size);
}
