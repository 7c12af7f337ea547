// Shows a program another time of day than the kernel has, by CLOCK_AHEAD_S: as on a host whose clock is wrong, or to
// code that took its time of day before the clock was set back by as much, and asks the kernel to wait until then.
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) {
    const char *text = getenv("CLOCK_AHEAD_S");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    const long failed = syscall(SYS_clock_gettime, clock, found);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        found->tv_sec += ahead();
    }
    return (int)failed;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) {
        *found = now.tv_sec;
    }
    return now.tv_sec;
}
