/* Counts the file operations of a process below some folders, and lets one of them fail. For LD_PRELOAD.

   Every function of the C library through which CPython, Rust, Arrow, SQLite or C++ reach files is here, so it does not
   matter who calls. An operation has a name, a path and a number: the how-manieth of this name on this path it is.
   Threads that work on different files change neither. Digits that differ from run to run are a star in the path.

   `failing_begin` arms it, in one process and the children that are forked later. Until then nothing is looked at. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define LONGEST 4096
#define MOST 65536 /* different operations; a power of two */

static const int ERRNOS[] = {EIO, ENOSPC, EDQUOT, EROFS, EACCES, ENOENT};

/* Which errnos an operation may return, in the order of ERRNOS. */
static const struct { const char *name, *may; } KINDS[] = {
    {"open", "100011"},    {"create", "111111"},  {"read", "100000"},   {"write", "111100"},  {"sync", "111100"},
    {"resize", "111100"},  {"truncate", "111111"}, {"rename", "111111"}, {"link", "111111"},   {"mkdir", "111111"},
    {"remove", "100111"},  {"stat", "100011"},    {"fstat", "100000"},  {"access", "100011"}, {"may write", "100111"},
    {"readlink", "100011"}, {"list", "100011"},   {"entry", "100001"},  {"mode", "100111"},   {"fmode", "100100"},
    {"map", "100010"},     {"copy", "111100"},    {"lock", "100010"},   {"close", "111000"},  {"statfs", "100011"},
};

static struct {
    int armed, log, number, error, for_good, failed, root;
    char roots[8][LONGEST], kind[32], path[LONGEST];
    int num_roots;
    unsigned long count;
} now;
static struct { char *what; int times; } seen[MOST];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread int inside;

int failing_may(const char *kind, int error) {
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        if (!strcmp(kind, KINDS[i].name))
            for (int j = 0; j < 6; j++)
                if (ERRNOS[j] == error) return KINDS[i].may[j] == '1';
    return 0;
}

/* roots: folders, one a line. Without a kind nothing fails. */
int failing_begin(const char *roots, const char *log, const char *kind, const char *path, int number, int error,
                  int for_good) {
    now.num_roots = 0;
    for (const char *at = roots; *at && now.num_roots < 8;) {
        size_t length = strcspn(at, "\n");
        snprintf(now.roots[now.num_roots++], LONGEST, "%.*s", (int)length, at);
        at += length + (at[length] == '\n');
    }
    now.log = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    snprintf(now.kind, sizeof now.kind, "%s", kind);
    snprintf(now.path, sizeof now.path, "%s", path);
    now.number = number, now.error = error, now.for_good = for_good, now.failed = 0, now.count = 0;
    now.armed = now.log >= 0;
    return now.armed;
}

/* Without `.`, `..` and double slashes. */
static void normal(char *path) {
    char out[LONGEST] = "", *save, *part;
    for (part = strtok_r(path, "/", &save); part; part = strtok_r(NULL, "/", &save)) {
        if (!strcmp(part, ".")) continue;
        if (!strcmp(part, "..")) { char *slash = strrchr(out, '/'); if (slash) *slash = 0; continue; }
        strncat(out, "/", LONGEST - strlen(out) - 1), strncat(out, part, LONGEST - strlen(out) - 1);
    }
    strcpy(path, *out ? out : "/");
}

/* Whether a word of a path is one that chance or the clock has made: `tmpk3q_x0a1`, `.tmpMe7VJu`, `1a2b3c4d`. */
static int of_chance(const char *word, size_t length) {
    if (!strncmp(word, "tmp", 3) && (length == 11 || (length == 9 && word[-1] == '.'))) return 1;
    return length >= 8 && strspn(word, "0123456789abcdef") >= length;
}

/* Such words are a star, and so is what TensorBoard calls its folder and file. */
static void without_chance(char *path) {
    static const char *WORD = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_";
    char *curves = strstr(path, "/runs/"), *out = path;
    if (curves && strchr(curves + 6, '/')) strcpy(curves + 6, "*/events");
    else if (curves) strcpy(curves + 6, "*");
    for (char *at = path; *at;) {
        size_t length = strspn(at, WORD);
        if (of_chance(at, length)) *out++ = '*', at += length;
        else if (length) memmove(out, at, length), out += length, at += length;
        else if (*at == '#') *out++ = '*', at += 1 + strspn(at + 1, "0123456789"); /* a file without a name */
        else *out++ = *at++;
    }
    *out = 0;
}

static int times(const char *what) {
    unsigned long hash = 5381;
    for (const char *at = what; *at; at++) hash = hash * 33 + (unsigned char)*at;
    for (unsigned long i = hash & (MOST - 1);; i = (i + 1) & (MOST - 1)) {
        if (!seen[i].what) seen[i].what = strdup(what);
        if (!strcmp(seen[i].what, what)) return ++seen[i].times;
    }
}

/* The errno with which this operation has to fail; 0 lets it be done. */
static int due(const char *kind, char *path) {
    int root = -1, error = 0, saved = errno;
    normal(path);
    for (int i = 0; i < now.num_roots; i++) {
        size_t length = strlen(now.roots[i]);
        if (!strncmp(path, now.roots[i], length) && (!path[length] || path[length] == '/')) { root = i; break; }
    }
    if (root < 0) return 0;
    char shown[LONGEST], what[LONGEST + 64], line[LONGEST + 160];
    const char *base = strrchr(now.roots[root], '/');
    snprintf(shown, sizeof shown, "%s%s", base ? base + 1 : "", path + strlen(now.roots[root]));
    without_chance(shown);
    pthread_mutex_lock(&mutex);
    snprintf(what, sizeof what, "%s\t%s", kind, shown);
    int number = times(what);
    if (now.failed ? now.for_good && root == now.root && failing_may(kind, now.error)
                   : number == now.number && !strcmp(kind, now.kind) && !strcmp(shown, now.path)) {
        if (!now.failed) now.root = root;
        now.failed = 1, error = now.error;
    }
    int length = snprintf(line, sizeof line, "%lu\t%s\t%d\t%d\n", ++now.count, what, number, error);
    syscall(SYS_write, now.log, line, length);
    pthread_mutex_unlock(&mutex);
    errno = saved;
    return error;
}

static int due_at(const char *kind, int folder, const char *name) {
    if (!now.armed || inside || !name) return 0;
    char path[LONGEST] = "", link[64];
    if (*name != '/') {
        if (folder == AT_FDCWD) syscall(SYS_getcwd, path, sizeof path);
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            long length = syscall(SYS_readlink, link, path, sizeof path - 1);
            if (length < 0) return 0;
            path[length] = 0;
        }
    }
    size_t length = strlen(path);
    snprintf(path + length, sizeof path - length, "/%s", name);
    return due(kind, path);
}

static int due_of(const char *kind, int handle) {
    if (!now.armed || inside || handle < 0) return 0;
    char path[LONGEST], link[64];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    long length = syscall(SYS_readlink, link, path, sizeof path - 1);
    errno = saved;
    if (length < 0 || *path != '/') return 0; /* a pipe, a socket */
    path[length] = 0;
    char *deleted = strstr(path, " (deleted)");
    if (deleted) *deleted = 0;
    return due(kind, path);
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
/* `how` is due_at(...) or due_of(...) of the operation. */
#define GUARD(how, failure) do { int error = how; if (error) { errno = error; return failure; } } while (0)
#define DEFINE(type, name, parameters, arguments, how, failure) \
    type name parameters { REAL(name); GUARD(how, failure); return real arguments; }
#define TWICE(type, name, parameters, arguments, how, failure) \
    DEFINE(type, name, parameters, arguments, how, failure) DEFINE(type, name##64, parameters, arguments, how, failure)

static const char *opening(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) ? "create" : "open"; }

#define OPEN(name, parameters, arguments, folder) \
    int name parameters { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | __O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
        GUARD(due_at(opening(flags), folder, path), -1); \
        return real arguments; \
    }
OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode), folder)
OPEN(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode), folder)
TWICE(int, creat, (const char *path, mode_t mode), (path, mode), due_at("create", AT_FDCWD, path), -1)
TWICE(FILE *, fopen, (const char *path, const char *mode), (path, mode),
      due_at(strpbrk(mode, "wa+") ? "create" : "open", AT_FDCWD, path), NULL)
int __open_2(const char *path, int flags) { return open(path, flags); }
int __open64_2(const char *path, int flags) { return open64(path, flags); }
int __openat_2(int folder, const char *path, int flags) { return openat(folder, path, flags); }
int __openat64_2(int folder, const char *path, int flags) { return openat64(folder, path, flags); }

DEFINE(ssize_t, read, (int handle, void *to, size_t size), (handle, to, size), due_of("read", handle), -1)
TWICE(ssize_t, pread, (int handle, void *to, size_t size, off_t at), (handle, to, size, at), due_of("read", handle), -1)
DEFINE(ssize_t, readv, (int handle, const struct iovec *to, int count), (handle, to, count), due_of("read", handle), -1)
TWICE(ssize_t, preadv, (int handle, const struct iovec *to, int count, off_t at), (handle, to, count, at),
      due_of("read", handle), -1)
ssize_t __read_chk(int handle, void *to, size_t size, size_t room) { return read(handle, to, size); }
DEFINE(size_t, fread, (void *to, size_t size, size_t count, FILE *file), (to, size, count, file),
       due_of("read", fileno(file)), 0)
DEFINE(ssize_t, write, (int handle, const void *from, size_t size), (handle, from, size), due_of("write", handle), -1)
TWICE(ssize_t, pwrite, (int handle, const void *from, size_t size, off_t at), (handle, from, size, at),
      due_of("write", handle), -1)
DEFINE(ssize_t, writev, (int handle, const struct iovec *from, int count), (handle, from, count),
       due_of("write", handle), -1)
TWICE(ssize_t, pwritev, (int handle, const struct iovec *from, int count, off_t at), (handle, from, count, at),
      due_of("write", handle), -1)
DEFINE(size_t, fwrite, (const void *from, size_t size, size_t count, FILE *file), (from, size, count, file),
       due_of("write", fileno(file)), 0)
DEFINE(int, fsync, (int handle), (handle), due_of("sync", handle), -1)
DEFINE(int, fdatasync, (int handle), (handle), due_of("sync", handle), -1)
DEFINE(int, msync, (void *at, size_t size, int flags), (at, size, flags), 0, -1)
TWICE(int, ftruncate, (int handle, off_t size), (handle, size), due_of("resize", handle), -1)
TWICE(int, truncate, (const char *path, off_t size), (path, size), due_at("truncate", AT_FDCWD, path), -1)
TWICE(int, fallocate, (int handle, int mode, off_t at, off_t size), (handle, mode, at, size),
      due_of("resize", handle), -1)
int posix_fallocate(int handle, off_t at, off_t size) {
    REAL(posix_fallocate);
    int error = due_of("resize", handle);
    return error ? error : real(handle, at, size);
}
int posix_fallocate64(int handle, off_t at, off_t size) { return posix_fallocate(handle, at, size); }

DEFINE(int, rename, (const char *from, const char *to), (from, to), due_at("rename", AT_FDCWD, to), -1)
DEFINE(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), due_at("rename", b, to), -1)
DEFINE(int, renameat2, (int a, const char *from, int b, const char *to, unsigned flags), (a, from, b, to, flags),
       due_at("rename", b, to), -1)
DEFINE(int, link, (const char *from, const char *to), (from, to), due_at("link", AT_FDCWD, to), -1)
DEFINE(int, linkat, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags),
       due_at("link", b, to), -1)
DEFINE(int, symlink, (const char *from, const char *to), (from, to), due_at("link", AT_FDCWD, to), -1)
DEFINE(int, symlinkat, (const char *from, int folder, const char *to), (from, folder, to), due_at("link", folder, to), -1)
DEFINE(int, unlink, (const char *path), (path), due_at("remove", AT_FDCWD, path), -1)
DEFINE(int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags), due_at("remove", folder, path), -1)
DEFINE(int, rmdir, (const char *path), (path), due_at("remove", AT_FDCWD, path), -1)
DEFINE(int, remove, (const char *path), (path), due_at("remove", AT_FDCWD, path), -1)
DEFINE(int, mkdir, (const char *path, mode_t mode), (path, mode), due_at("mkdir", AT_FDCWD, path), -1)
DEFINE(int, mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), due_at("mkdir", folder, path), -1)

#define STAT(name, type, parameters, arguments, how) DEFINE(int, name, parameters, arguments, how, -1)
STAT(stat, , (const char *restrict path, struct stat *restrict to), (path, to), due_at("stat", AT_FDCWD, path))
STAT(stat64, , (const char *restrict path, struct stat64 *restrict to), (path, to), due_at("stat", AT_FDCWD, path))
STAT(lstat, , (const char *restrict path, struct stat *restrict to), (path, to), due_at("stat", AT_FDCWD, path))
STAT(lstat64, , (const char *restrict path, struct stat64 *restrict to), (path, to), due_at("stat", AT_FDCWD, path))
STAT(fstat, , (int handle, struct stat *to), (handle, to), due_of("fstat", handle))
STAT(fstat64, , (int handle, struct stat64 *to), (handle, to), due_of("fstat", handle))
static int due_stat(int folder, const char *path) {
    return path && *path ? due_at("stat", folder, path) : due_of("fstat", folder);
}
STAT(fstatat, , (int folder, const char *restrict path, struct stat *restrict to, int flags), (folder, path, to, flags),
     due_stat(folder, path))
STAT(fstatat64, , (int folder, const char *restrict path, struct stat64 *restrict to, int flags),
     (folder, path, to, flags), due_stat(folder, path))
STAT(statx, , (int folder, const char *restrict path, int flags, unsigned mask, struct statx *restrict to),
     (folder, path, flags, mask, to), due_stat(folder, path))
/* What libraries that were built with an older C library call. */
int __xstat(int, const char *, struct stat *);
int __xstat64(int, const char *, struct stat64 *);
int __lxstat(int, const char *, struct stat *);
int __lxstat64(int, const char *, struct stat64 *);
int __fxstat(int, int, struct stat *);
int __fxstat64(int, int, struct stat64 *);
int __fxstatat(int, int, const char *, struct stat *, int);
int __fxstatat64(int, int, const char *, struct stat64 *, int);
STAT(__xstat, , (int v, const char *path, struct stat *to), (v, path, to), due_at("stat", AT_FDCWD, path))
STAT(__xstat64, , (int v, const char *path, struct stat64 *to), (v, path, to), due_at("stat", AT_FDCWD, path))
STAT(__lxstat, , (int v, const char *path, struct stat *to), (v, path, to), due_at("stat", AT_FDCWD, path))
STAT(__lxstat64, , (int v, const char *path, struct stat64 *to), (v, path, to), due_at("stat", AT_FDCWD, path))
STAT(__fxstat, , (int v, int handle, struct stat *to), (v, handle, to), due_of("fstat", handle))
STAT(__fxstat64, , (int v, int handle, struct stat64 *to), (v, handle, to), due_of("fstat", handle))
STAT(__fxstatat, , (int v, int folder, const char *path, struct stat *to, int flags), (v, folder, path, to, flags),
     due_stat(folder, path))
STAT(__fxstatat64, , (int v, int folder, const char *path, struct stat64 *to, int flags), (v, folder, path, to, flags),
     due_stat(folder, path))

static const char *asking(int mode) { return mode & W_OK ? "may write" : "access"; }
DEFINE(int, access, (const char *path, int mode), (path, mode), due_at(asking(mode), AT_FDCWD, path), -1)
DEFINE(int, faccessat, (int folder, const char *path, int mode, int flags), (folder, path, mode, flags),
       due_at(asking(mode), folder, path), -1)
DEFINE(ssize_t, readlink, (const char *restrict path, char *restrict to, size_t size), (path, to, size),
       due_at("readlink", AT_FDCWD, path), -1)
DEFINE(ssize_t, readlinkat, (int folder, const char *restrict path, char *restrict to, size_t size),
       (folder, path, to, size), due_at("readlink", folder, path), -1)
DEFINE(char *, realpath, (const char *restrict path, char *restrict to), (path, to),
       due_at("readlink", AT_FDCWD, path), NULL)
DEFINE(int, statvfs, (const char *restrict path, struct statvfs *restrict to), (path, to),
       due_at("statfs", AT_FDCWD, path), -1)
DEFINE(int, statvfs64, (const char *restrict path, struct statvfs64 *restrict to), (path, to),
       due_at("statfs", AT_FDCWD, path), -1)
DEFINE(int, statfs, (const char *path, struct statfs *to), (path, to), due_at("statfs", AT_FDCWD, path), -1)
DEFINE(int, statfs64, (const char *path, struct statfs64 *to), (path, to), due_at("statfs", AT_FDCWD, path), -1)
DEFINE(DIR *, opendir, (const char *path), (path), due_at("list", AT_FDCWD, path), NULL)
DEFINE(DIR *, fdopendir, (int handle), (handle), due_of("list", handle), NULL)
DEFINE(struct dirent *, readdir, (DIR *folder), (folder), due_of("entry", dirfd(folder)), NULL)
DEFINE(struct dirent64 *, readdir64, (DIR *folder), (folder), due_of("entry", dirfd(folder)), NULL)
DEFINE(int, chmod, (const char *path, mode_t mode), (path, mode), due_at("mode", AT_FDCWD, path), -1)
DEFINE(int, fchmodat, (int folder, const char *path, mode_t mode, int flags), (folder, path, mode, flags),
       due_at("mode", folder, path), -1)
DEFINE(int, fchmod, (int handle, mode_t mode), (handle, mode), due_of("fmode", handle), -1)
int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    REAL(utimensat);
    GUARD(path ? due_at("mode", folder, path) : due_of("fmode", folder), -1);
    return real(folder, path, times, flags);
}
int futimens(int handle, const struct timespec times[2]) {
    REAL(futimens);
    GUARD(due_of("fmode", handle), -1);
    return real(handle, times);
}
TWICE(void *, mmap, (void *at, size_t size, int access, int flags, int handle, off_t offset),
      (at, size, access, flags, handle, offset), flags & MAP_ANONYMOUS ? 0 : due_of("map", handle), MAP_FAILED)
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    static ssize_t (*real)(int, int, off_t *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "sendfile");
    GUARD(due_of("copy", to), -1);
    return real(to, from, at, size);
}
ssize_t sendfile64(int to, int from, off_t *at, size_t size) { return sendfile(to, from, at, size); }
DEFINE(ssize_t, copy_file_range, (int from, off64_t *at, int to, off64_t *there, size_t size, unsigned flags),
       (from, at, to, there, size, flags), due_of("copy", to), -1)
int flock(int, int);
DEFINE(int, flock, (int handle, int how), (handle, how), due_of("lock", handle), -1)
#define FCNTL(name) \
    int name(int handle, int command, ...) { \
        REAL(name); \
        va_list more; va_start(more, command); void *argument = va_arg(more, void *); va_end(more); \
        if (command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW) \
            GUARD(due_of("lock", handle), -1); \
        return real(handle, command, argument); \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

/* Closing says what writing has not said yet; of a file that was read it succeeds. */
static int due_close(int handle) {
    int flags = now.armed ? fcntl(handle, F_GETFL) : -1;
    return flags < 0 || (flags & O_ACCMODE) == O_RDONLY ? 0 : due_of("close", handle);
}
int close(int handle) {
    REAL(close);
    int error = due_close(handle), result = real(handle);
    if (!error) return result;
    errno = error;
    return -1;
}
int fclose(FILE *file) {
    REAL(fclose);
    int error = due_close(fileno(file)), result = real(file);
    if (!error) return result;
    errno = error;
    return EOF;
}
