/* The wall clock of the processes that load this library is off by what a file says: nanoseconds, as a 64-bit integer.
   The monotonic clock, and so every duration, is left alone. Built by clocks.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define EARLIEST 1000000000LL /* of a wall clock, in seconds: a deadline before it is one of the monotonic clock */

static const volatile int64_t *offset_ns;

__attribute__((constructor)) static void map(void) {
    const char *path = getenv("FLYBALL_WALL_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) offset_ns = mapped;
}

static void shift(struct timespec *at, int64_t by_ns) {
    int64_t ns = at->tv_nsec + by_ns % SECOND;
    at->tv_sec += by_ns / SECOND + (ns < 0 ? -1 : ns >= SECOND);
    at->tv_nsec = (ns + SECOND) % SECOND;
}

static int64_t offset(void) { return offset_ns ? *offset_ns : 0; }

/* A deadline that was computed with the shifted clock, as the kernel's clock has it. */
static struct timespec real(const struct timespec *deadline) {
    struct timespec at = *deadline;
    if (at.tv_sec >= EARLIEST) shift(&at, -offset());
    return at;
}

static void *next(const char *name, const char *version) {
    void *found = version ? dlvsym(RTLD_NEXT, name, version) : NULL;
    return found ? found : dlsym(RTLD_NEXT, name);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original) original = next("clock_gettime", NULL);
    int failed = original(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) shift(at, offset());
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static int (*original)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!original) original = next("pthread_cond_timedwait", "GLIBC_2.3.2"); /* its default on x86-64 */
    struct timespec at = real(deadline);
    return original(condition, mutex, &at);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    static int (*original)(sem_t *, const struct timespec *);
    if (!original) original = next("sem_timedwait", NULL);
    struct timespec at = real(deadline);
    return original(semaphore, &at);
}
