/* Mapped files that are truncated while they are read. Called through ctypes (mapped.py).
 *
 * A page behind the end of its file cannot be read: the system sends SIGBUS, in whichever thread touches it first, in the
 * middle of any instruction. Here what is gone becomes zeros, and a flag of the file says so: who reads it looks there
 * afterwards, throws away what it computed, and can say in order what happened. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define FILES 2048

static struct {
    atomic_uintptr_t start, end; /* 0, 0 = free */
} files[FILES];
volatile int32_t kv_truncated[FILES];

static struct sigaction before;
static uintptr_t page_size;

/* The number of the file that an address is in, -1 = none. */
static int file_at(uintptr_t address) {
    for (int i = 0; i < FILES; i++)
        if (atomic_load(&files[i].start) <= address && address < atomic_load(&files[i].end)) return i;
    return -1;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    uintptr_t address = (uintptr_t)info->si_addr, page = address & ~(page_size - 1);
    int file = info->si_code == BUS_ADRERR ? file_at(address) : -1;
    if (file >= 0) {
        uintptr_t end = (atomic_load(&files[file].end) + page_size - 1) & ~(page_size - 1);
        void *zeros = mmap((void *)page, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (zeros != MAP_FAILED) {
            kv_truncated[file] = 1;
            return;
        }
    }
    sigaction(SIGBUS, &before, NULL); /* not ours: the instruction is tried again, and what was there before sees it */
}

/* Watch the memory that a file is mapped to. Returns its number in kv_truncated; -1 = not watched. */
int kv_watch(const void *start, size_t size) {
    static atomic_flag ready = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&ready)) {
        struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
        page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
        sigemptyset(&action.sa_mask);
        if (sigaction(SIGBUS, &action, &before)) return -1;
    }
    for (int i = 0; i < FILES; i++) {
        if (atomic_load(&files[i].end)) continue;
        kv_truncated[i] = 0;
        atomic_store(&files[i].start, (uintptr_t)start);
        atomic_store(&files[i].end, (uintptr_t)start + size);
        return i;
    }
    return -1;
}

void kv_forget(int file) {
    atomic_store(&files[file].end, 0);
    atomic_store(&files[file].start, 0);
}
