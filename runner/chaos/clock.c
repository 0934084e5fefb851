/* Adds an offset to libc's wall clock, in the processes that preload this library; see sandbox.py.

   Deadlines of semaphores and conditions are wall-clock times, except those of the monotonic clock, which are small
   numbers. The kernel's clock has not jumped, so it gets the deadline without the offset. */

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

static const volatile int64_t none = 0, *offset = &none;

__attribute__((constructor)) static void open_offset(void) {
    const char *path = getenv("CHAOS_CLOCK_OFFSET");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *page = mmap(0, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) offset = page;
    close(fd);
}

static void *libc(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");  /* x86-64 has an older version of some symbols */
    return found ? found : dlsym(RTLD_NEXT, name);
}

int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = libc("clock_gettime");
    int result = real(id, t);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) t->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}

static struct timespec of_the_kernel(const struct timespec *deadline) {
    struct timespec t = *deadline;
    if (t.tv_sec > 1000000000) t.tv_sec -= *offset;
    return t;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = libc("sem_timedwait");
    struct timespec t = of_the_kernel(deadline);
    return real(semaphore, &t);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = libc("pthread_cond_timedwait");
    struct timespec t = of_the_kernel(deadline);
    return real(condition, mutex, &t);
}
