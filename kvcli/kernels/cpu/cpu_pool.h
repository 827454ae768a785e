/* Threads that share the tasks of a call. Included by cpu.c.
 *
 * Tasks are claimed one by one, and the caller takes part. It waits for tasks that another thread has begun, never for
 * a thread: one that sleeps, or whose core another program has, merely does nothing of this call. Whoever waits spins
 * for a moment, then sleeps, so that its core is free for whoever has work.
 *
 * How many threads take part is measured: where other programs want the cores, fewer are faster. */

#define MAX_THREADS 1024
#define HELPER_SPINS 4000 /* between the calls of a token: a sleeping helper would come too late for most of them */
#define CALLER_SPINS 1000 /* while the last tasks are finished */

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- how many threads ------------------------------------------------------------------------------------------ */

/* Windows of calls are compared by their speed: the time that one undisturbed thread would have taken over the time
 * that passed. While it is near the number of threads, nothing is tried. Where it is not, fewer threads are, and where
 * fewer are in use than may be, more from time to time; each for a window, and the faster number stays. After a trial of
 * fewer that failed the next is of more: `alone` is too little where tasks differ, so that all numbers may look poor. */

#define WINDOW_NS 12000000 /* several time slices of a scheduler */
#define WINDOW_CALLS 32
#define GOOD_SHARE 0.7     /* speed per thread; at or above it fewer threads are not tried */
#define WORTH 1.05         /* more threads must be faster by this */
#define FIRST_PAUSE_NS 100000000 /* between a trial that failed and the next; doubled each time */
#define LONGEST_PAUSE_NS 2000000000

typedef struct {
    int64_t limit, active; /* threads that may take part, and that do */
    int64_t before;        /* `active` before the trial that is on; 0 = none is */
    int64_t next, pause;   /* when the next trial may begin, and how long it is put off by one that fails */
    int64_t calls;         /* of this window, and its sums in ns */
    double alone, passed;
    double speed; /* of the last window that was no trial */
    int64_t up;   /* the last trial that failed was of fewer threads: the next is of more */
} kv_tuner;

void kv_tuner_reset(kv_tuner *t, int64_t limit) {
    memset(t, 0, sizeof *t);
    t->limit = t->active = limit;
    t->pause = FIRST_PAUSE_NS;
}

static void begin_trial(kv_tuner *t, int64_t active) { t->before = t->active, t->active = active; }

static void end_trial(kv_tuner *t, double speed, int64_t now) {
    int more = t->active > t->before, better = speed > (more ? WORTH : 1.0) * t->speed;
    if (better) {
        t->speed = speed, t->pause = FIRST_PAUSE_NS;
        t->next = more ? now : now + t->pause;
    } else {
        t->active = t->before, t->up = !more;
        t->next = now + t->pause;
        t->pause = t->pause < LONGEST_PAUSE_NS / 2 ? t->pause * 2 : LONGEST_PAUSE_NS;
    }
    t->before = 0;
}

/* A call ended at `now` that took `passed` ns; one undisturbed thread would have needed `alone`. */
void kv_tuner_add(kv_tuner *t, int64_t now, double alone, double passed) {
    t->alone += alone, t->passed += passed, t->calls++;
    if (t->passed < WINDOW_NS || t->calls < WINDOW_CALLS) return;
    double speed = t->alone / t->passed;
    t->calls = 0, t->alone = t->passed = 0;
    if (t->before) {
        end_trial(t, speed, now);
        return;
    }
    t->speed = speed;
    int64_t step = t->active > 4 ? t->active / 4 : 1, poor = t->active > 1 && speed < GOOD_SHARE * (double)t->active;
    if (now < t->next) return;
    if (t->active < t->limit && (t->up || !poor))
        begin_trial(t, t->active + step < t->limit ? t->active + step : t->limit);
    else if (poor)
        begin_trial(t, t->active - step);
}

/* ---- the pool -------------------------------------------------------------------------------------------------- */

typedef void (*task_fn)(void *arg, int64_t task, int thread);

static struct {
    kv_tuner tuner;
    int started; /* threads that exist, the caller's included */
    task_fn fn;
    void *arg;
    int64_t n_tasks;
    atomic_uint_fast64_t ticket; /* number of the call << 32 | tasks that nobody has claimed */
    atomic_long done;
    atomic_int active, sleeping, caller_sleeps; /* `sleeping`: of the active ones */
    pthread_mutex_t lock;
    pthread_cond_t wake, unpark, finished;
    float *scratch[MAX_THREADS];
    size_t scratch_floats[MAX_THREADS];
} pool = {.tuner = {1, 1}, .started = 1, .active = 1, .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER, .unpark = PTHREAD_COND_INITIALIZER, .finished = PTHREAD_COND_INITIALIZER};

#if defined(__x86_64__)
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("isb" : : : "memory") /* takes a while, which `yield` does not: it does nothing on most */
#else
#define RELAX() ((void)0)
#endif

#define UNCLAIMED(ticket) ((ticket) & 0xffffffff)

static void signal_all(pthread_cond_t *condition) {
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(condition);
    pthread_mutex_unlock(&pool.lock);
}

/* Claim a task of whatever call is on; -1 = there is none. What the call is stays valid until the task is done. */
static int64_t claim(void) {
    uint_fast64_t ticket = atomic_load(&pool.ticket);
    while (UNCLAIMED(ticket))
        if (atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket - 1)) return pool.n_tasks - (int64_t)UNCLAIMED(ticket);
    return -1;
}

static int is_active(int thread) { return thread < atomic_load(&pool.active); }

static int has_work(int thread) { return UNCLAIMED(atomic_load(&pool.ticket)) && is_active(thread); }

static void sleep_until_work(int thread) {
    pthread_mutex_lock(&pool.lock);
    while (!has_work(thread)) {
        if (is_active(thread)) {
            atomic_fetch_add(&pool.sleeping, 1);
            if (!has_work(thread)) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.sleeping, 1);
        } else {
            pthread_cond_wait(&pool.unpark, &pool.lock);
        }
    }
    pthread_mutex_unlock(&pool.lock);
}

static void *helper(void *arg) {
    int thread = (int)(intptr_t)arg;
    for (;;) {
        for (int spin = 0; spin < HELPER_SPINS && is_active(thread) && !has_work(thread); spin++) RELAX();
        if (!has_work(thread)) sleep_until_work(thread);
        for (int64_t task; (task = claim()) >= 0;) {
            int64_t n_tasks = pool.n_tasks;
            pool.fn(pool.arg, task, thread);
            if (atomic_fetch_add(&pool.done, 1) + 1 == n_tasks && atomic_load(&pool.caller_sleeps))
                signal_all(&pool.finished);
        }
    }
    return NULL;
}

static void wait_for_tasks(int64_t n_tasks) {
    for (int spin = 0; spin < CALLER_SPINS; spin++) {
        if (atomic_load(&pool.done) == n_tasks) return;
        RELAX();
    }
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.caller_sleeps, 1);
    while (atomic_load(&pool.done) != n_tasks) pthread_cond_wait(&pool.finished, &pool.lock);
    atomic_store(&pool.caller_sleeps, 0);
    pthread_mutex_unlock(&pool.lock);
}

/* Held by whoever runs tasks: several engines of a process take turns, call by call. */
static pthread_mutex_t callers = PTHREAD_MUTEX_INITIALIZER;

static void run_tasks(int64_t n_tasks, task_fn fn, void *arg, int tells) {
    if (pool.tuner.limit <= 1 || n_tasks <= 1) {
        for (int64_t t = 0; t < n_tasks; t++) fn(arg, t, 0);
        return;
    }
    int64_t began = nanoseconds(), at = began, shortest = INT64_MAX;
    pool.fn = fn, pool.arg = arg, pool.n_tasks = n_tasks;
    atomic_store(&pool.done, 0);
    int more = pool.tuner.active > atomic_exchange(&pool.active, (int)pool.tuner.active);
    atomic_store(&pool.ticket, ((atomic_load(&pool.ticket) >> 32) + 1) << 32 | (uint_fast64_t)n_tasks);
    if (more) signal_all(&pool.unpark);
    if (atomic_load(&pool.sleeping) > 0) signal_all(&pool.wake);
    for (int64_t task; (task = claim()) >= 0;) {
        fn(arg, task, 0);
        atomic_fetch_add(&pool.done, 1);
        int64_t now = nanoseconds();
        if (now - at < shortest) shortest = now - at;
        at = now;
    }
    if (atomic_load(&pool.done) != n_tasks) wait_for_tasks(n_tasks);
    int64_t now = nanoseconds();
    if (tells && shortest != INT64_MAX) kv_tuner_add(&pool.tuner, now, (double)shortest * (double)n_tasks, (double)(now - began));
}

/* Run fn(arg, task, thread) for every task of [0, n_tasks). `tells`: whether its speed says how many threads are best, which it
 * does not where tasks wait for fresh memory. */
static void parallel_that(int64_t n_tasks, task_fn fn, void *arg, int tells) {
    pthread_mutex_lock(&callers);
    run_tasks(n_tasks, fn, arg, tells);
    pthread_mutex_unlock(&callers);
}

static void parallel(int64_t n_tasks, task_fn fn, void *arg) { parallel_that(n_tasks, fn, arg, 1); }

static void start_threads(int threads) {
    pthread_mutex_lock(&callers);
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads < 1) threads = 1;
    for (; pool.started < threads; pool.started++) {
        pthread_t id;
        if (pthread_create(&id, NULL, helper, (void *)(intptr_t)pool.started)) break;
        pthread_detach(id);
    }
    kv_tuner_reset(&pool.tuner, threads < pool.started ? threads : pool.started);
    pthread_mutex_unlock(&callers);
}

/* Scratch of at least `floats` for one thread, 64-byte aligned; NULL-free: aborts the process when memory is gone. */
static float *scratch(int thread, size_t floats) {
    if (pool.scratch_floats[thread] < floats) {
        free(pool.scratch[thread]);
        size_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
        pool.scratch[thread] = aligned_alloc(64, bytes);
        if (!pool.scratch[thread]) abort();
        pool.scratch_floats[thread] = floats;
    }
    return pool.scratch[thread];
}
