/* A preloaded library that makes a disk misbehave, for files below one folder and for nothing else.
 *
 * What it does is read from a file that the test maps too (environment variable DISK_FAULTS_CONTROL), so one service process
 * can be steered from fault to fault without being restarted. The layout is the struct below; control.py has the same.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum site { PWRITE, FSYNC, RENAMEAT2, RENAMEAT, LINKAT, CREATE, FCHMOD, FLOCK, SYNC_FILE_RANGE, CLOSE, UNLINKAT, PREAD, NUM_SITES };

struct control {
    char root[1024];       /* the folder, without a slash at its end */
    char match[256];       /* only paths that contain this; "" for all */
    int64_t bytes_per_second; /* for all writes together; 0: as fast as they go */
    int64_t delay_us;      /* before the call that misbehaves; -1: for as long as this stands here */
    int32_t site;          /* which call misbehaves; -1: none */
    int32_t nth;           /* the first one that does, counted from 1 */
    int32_t times;         /* how many in a row do; -1: all from then on */
    int32_t error;         /* what they answer; 0: they go through */
    int32_t short_bytes;   /* a write takes no more bytes than this; 0: all */
    int32_t carried_out;   /* the error comes although the call was carried out */
    int32_t seen;          /* calls at this site since the test has reset it */
    int32_t fired;         /* calls that misbehaved */
    int32_t counts[NUM_SITES]; /* all calls below the folder that match */
};

static struct control *control;
static pthread_mutex_t throttle = PTHREAD_MUTEX_INITIALIZER;
static double next_free;

__attribute__((constructor)) static void map_control(void)
{
    const char *path = getenv("DISK_FAULTS_CONTROL");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    control = mapped == MAP_FAILED ? NULL : mapped;
}

/* Looks a real function up once. */
#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) \
        real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int below_root(int fd, const char *name)
{
    char link[64], path[PATH_MAX];
    if (!control || !control->root[0])
        return 0;
    size_t root = strlen(control->root);
    ssize_t size = 0;
    if (!name || name[0] != '/') {
        strcpy(link, "/proc/self/fd/");
        char digits[16];
        int count = 0, value = fd;
        if (fd < 0)
            return 0;
        do
            digits[count++] = (char)('0' + value % 10);
        while (value /= 10);
        char *end = link + strlen(link);
        while (count)
            *end++ = digits[--count];
        *end = 0;
        size = readlink(link, path, sizeof path - 1);
        if (size < 0)
            return 0;
    }
    path[size] = 0;
    if (name && strlen(path) + strlen(name) + 2 < sizeof path) {
        if (size)
            strcat(path, "/");
        strcat(path, name);
    }
    return !strncmp(path, control->root, root) && (path[root] == '/' || !path[root]) && strstr(path, control->match) != NULL;
}

/* Whether this call is one that misbehaves; counts it. */
static int strikes(enum site site)
{
    __atomic_add_fetch(&control->counts[site], 1, __ATOMIC_SEQ_CST);
    if (control->site != (int)site)
        return 0;
    int seen = __atomic_add_fetch(&control->seen, 1, __ATOMIC_SEQ_CST);
    if (seen < control->nth || (control->times >= 0 && seen >= control->nth + control->times))
        return 0;
    __atomic_add_fetch(&control->fired, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&control->delay_us, __ATOMIC_SEQ_CST) < 0)
        usleep(1000);
    if (control->delay_us)
        usleep((useconds_t)control->delay_us);
    return 1;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* As a disk does: one write after the other, and each waits for those before it. */
static void wait_for_disk(size_t bytes)
{
    if (!control->bytes_per_second)
        return;
    pthread_mutex_lock(&throttle);
    double start = now();
    next_free = (next_free > start ? next_free : start) + (double)bytes / (double)control->bytes_per_second;
    double wait = next_free - start;
    pthread_mutex_unlock(&throttle);
    usleep((useconds_t)(wait * 1e6));
}

/* The end of a wrapper: the error alone, or the call and then the error, or the call. */
#define ANSWER(site, below, call) \
    do { \
        if (!(below) || !strikes(site)) \
            return call; \
        int error = control->error; \
        if (!error) \
            return call; \
        if (control->carried_out) \
            (void)!(call); \
        errno = error; \
        return -1; \
    } while (0)

static ssize_t faulty_write(ssize_t (*real)(int, const void *, size_t, off64_t), int fd, const void *data, size_t size, off64_t offset)
{
    if (!below_root(fd, NULL))
        return real(fd, data, size, offset);
    wait_for_disk(size);
    if (!strikes(PWRITE))
        return real(fd, data, size, offset);
    size_t some = control->short_bytes;
    if (control->error) {
        errno = control->error;
        return -1;
    }
    return real(fd, data, some && some < size ? some : size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return faulty_write(real, fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return faulty_write(real, fd, data, size, offset);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset)
{
    REAL(ssize_t, "pread64", int, void *, size_t, off64_t);
    ANSWER(PREAD, below_root(fd, NULL), real(fd, data, size, offset));
}

int fsync(int fd)
{
    REAL(int, "fsync", int);
    ANSWER(FSYNC, below_root(fd, NULL), real(fd));
}

int fdatasync(int fd)
{
    REAL(int, "fdatasync", int);
    ANSWER(FSYNC, below_root(fd, NULL), real(fd));
}

int sync_file_range(int fd, off64_t offset, off64_t size, unsigned int flags)
{
    REAL(int, "sync_file_range", int, off64_t, off64_t, unsigned int);
    ANSWER(SYNC_FILE_RANGE, below_root(fd, NULL), real(fd, offset, size, flags));
}

int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned int flags)
{
    REAL(int, "renameat2", int, const char *, int, const char *, unsigned int);
    ANSWER(RENAMEAT2, below_root(to_fd, to), real(from_fd, from, to_fd, to, flags));
}

int renameat(int from_fd, const char *from, int to_fd, const char *to)
{
    REAL(int, "renameat", int, const char *, int, const char *);
    ANSWER(RENAMEAT, below_root(to_fd, to), real(from_fd, from, to_fd, to));
}

int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags)
{
    REAL(int, "linkat", int, const char *, int, const char *, int);
    ANSWER(LINKAT, below_root(to_fd, to), real(from_fd, from, to_fd, to, flags));
}

int unlinkat(int fd, const char *name, int flags)
{
    REAL(int, "unlinkat", int, const char *, int);
    ANSWER(UNLINKAT, below_root(fd, name), real(fd, name, flags));
}

int fchmod(int fd, mode_t mode)
{
    REAL(int, "fchmod", int, mode_t);
    ANSWER(FCHMOD, below_root(fd, NULL), real(fd, mode));
}

int flock(int fd, int operation)
{
    REAL(int, "flock", int, int);
    ANSWER(FLOCK, below_root(fd, NULL), real(fd, operation));
}

/* What Linux does: the descriptor is closed whatever the answer. */
int close(int fd)
{
    REAL(int, "close", int);
    int below = below_root(fd, NULL);
    int result = real(fd);
    if (!below || !strikes(CLOSE) || !control->error)
        return result;
    errno = control->error;
    return -1;
}

static int faulty_open(int (*real)(int, const char *, int, ...), int fd, const char *name, int flags, mode_t mode)
{
    ANSWER(CREATE, (flags & O_CREAT) && below_root(fd, name), real(fd, name, flags, mode));
}

int openat(int fd, const char *name, int flags, ...)
{
    static int (*real)(int, const char *, int, ...);
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (!real)
        real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat64");
    return faulty_open(real, fd, name, flags, mode);
}

int openat64(int fd, const char *name, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return openat(fd, name, flags, mode);
}
