/* Mapped files that are truncated while they are read. Called through ctypes (mapped.py).
 *
 * A page behind the end of its file cannot be read: the system sends SIGBUS, in whichever thread touches it first, in the
 * middle of any instruction. Here what is gone becomes zeros, and a flag of the file says so: who reads it looks there
 * afterwards, throws away what it computed, and then says what happened. */

#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define FILES 2048

static struct {
    atomic_uintptr_t start, end; /* end 0 = free */
    atomic_int truncated;
} files[FILES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of whoever adds files and the handler; the handler reads */
static struct sigaction before;
static uintptr_t page_size; /* 0 = the handler is not there yet */

/* The number of the file that an address is in, -1 = none. */
static int file_at(uintptr_t address) {
    for (int i = 0; i < FILES; i++)
        if (atomic_load(&files[i].start) <= address && address < atomic_load(&files[i].end)) return i;
    return -1;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    (void)context;
    uintptr_t address = (uintptr_t)info->si_addr, page = address & ~(page_size - 1);
    int file = info->si_code == BUS_ADRERR ? file_at(address) : -1;
    if (file >= 0) {
        uintptr_t end = (atomic_load(&files[file].end) + page_size - 1) & ~(page_size - 1);
        void *zeros = mmap((void *)page, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (zeros != MAP_FAILED) {
            atomic_store(&files[file].truncated, 1);
            return;
        }
    }
    sigaction(SIGBUS, &before, NULL); /* not ours: the instruction is tried again, and what was there before sees it */
    if (info->si_code <= 0) raise(number); /* sent by a process, not by an instruction */
}

/* Whether the handler is there. */
static int handled(void) {
    if (page_size) return 1;
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    page_size = (uintptr_t)sysconf(_SC_PAGESIZE); /* which the handler needs from its first moment on */
    if (sigaction(SIGBUS, &action, &before)) page_size = 0;
    return page_size != 0;
}

/* Watch the memory that a file is mapped to. Returns where it says whether the file was truncated; NULL = not watched. */
const atomic_int *kv_watch(const void *start, size_t size) {
    const atomic_int *flag = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; !flag && i < FILES && handled(); i++) {
        if (atomic_load(&files[i].end)) continue;
        flag = &files[i].truncated;
        atomic_store(&files[i].truncated, 0);
        atomic_store(&files[i].start, (uintptr_t)start);
        atomic_store(&files[i].end, (uintptr_t)start + size);
    }
    pthread_mutex_unlock(&lock);
    return flag;
}

/* Watch it no longer. `flag`: what kv_watch returned. */
void kv_forget(const atomic_int *flag) {
    for (int i = 0; i < FILES; i++)
        if (flag == &files[i].truncated) atomic_store(&files[i].end, 0);
}
