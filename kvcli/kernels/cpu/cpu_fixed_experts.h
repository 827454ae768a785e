/* Products of rows in fixed point with the interleaved matrices of experts. Included by cpu_fixed.h.
 *
 * Pairs are taken in the order of experts, FIXED_PAIRS at a time; those of one expert are a product of their own, whose tasks
 * are groups of its weight rows. */

typedef struct {
    NAME(fixed_args) a;
    int64_t first_task;
} NAME(fixed_run);

typedef struct {
    const kv_expert_products *e;
    kv_fixed **at; /* of each pair: where its first block goes; NULL = another time */
    int64_t *beside; /* how far the others are from each other */
    NAME(fixed_run) *runs;
    int64_t *states; /* of each run's matrices, when their use began */
    int64_t n_runs;
} NAME(fixed_pairs);

/* Some rows of x, each once for all of its pairs. */
static void NAME(pairs_to_fixed_task)(void *arg, int64_t task, int thread) {
    const NAME(fixed_pairs) *a = arg;
    const kv_expert_products *e = a->e;
    int64_t rows = e->pairs / e->each, blocks = e->k / 32;
    (void)thread;
    for (int64_t row = task * FIXED_ROWS; row < rows && row < (task + 1) * FIXED_ROWS; row++) {
        int64_t made = -1;
        for (int64_t p = row * e->each; p < (row + 1) * e->each; p++) {
            if (!a->at[p]) continue;
            if (made < 0) NAME(to_fixed)(e->x + row * e->ldx, e->k, a->at[p], a->beside[p]), made = p;
            else for (int64_t b = 0; b < blocks; b++) a->at[p][b * a->beside[p]] = a->at[made][b * a->beside[made]];
        }
    }
}

static void NAME(fixed_run_task)(void *arg, int64_t task, int thread) {
    const NAME(fixed_pairs) *a = arg;
    const NAME(fixed_run) *run = a->runs + a->n_runs - 1;
    while (task < run->first_task) run--;
    NAME(fixed_task)((void *)&run->a, task - run->first_task, thread);
}

/* The runs of pairs [first, last) in their order; returns how many rows in fixed point they have, with those that fill tiles. */
static int64_t NAME(fixed_runs)(NAME(fixed_pairs) *a, int64_t first, int64_t last) {
    const kv_expert_products *e = a->e;
    int64_t rows = 0;
    a->n_runs = 0;
    for (int64_t i = 0, lo = 0; i < e->experts; lo = e->end[i++]) {
        int64_t from = lo > first ? lo : first, to = e->end[i] < last ? e->end[i] : last;
        if (from >= to) continue;
        NAME(fixed_args) args = {e->w + i * e->apart, e->n_weights, to - from, e->k, e->ldx, e->ldy, 0, 0, 0, e->x, e->y, NULL,
                                 e->order + from};
        for (int64_t n = 0; n < e->n_weights; n++) args.groups += groups_of(args.w + n);
        a->runs[a->n_runs++] = (NAME(fixed_run)){args, 0};
        rows += NAME(fixed_rows_of)(to - from);
    }
    return rows;
}

/* Where rows go, and tasks that take about as long, whether an expert has many rows or few; returns their number. */
static int64_t NAME(place_pairs)(NAME(fixed_pairs) *a, kv_fixed *fixed) {
    int64_t tiles = 0, tasks = 0;
    for (int64_t i = 0; i < a->n_runs; i++) tiles += a->runs[i].a.groups * ((a->runs[i].a.m + MOST_ROWS - 1) / MOST_ROWS);
    for (int64_t i = 0; i < a->n_runs; i++) {
        NAME(fixed_args) *run = &a->runs[i].a;
        run->fixed = fixed, fixed += NAME(fixed_rows_of)(run->m) * (run->k / 32);
        for (int64_t m = 0; m < run->m; m++)
            a->at[run->pairs[m]] = NAME(fixed_row)(run, m), a->beside[run->pairs[m]] = NAME(beside)(run, m);
        run->groups_per_task = tiles / ((run->m + MOST_ROWS - 1) / MOST_ROWS) / (pool.tuner.limit * 8);
        if (run->groups_per_task < 1) run->groups_per_task = 1;
        a->runs[i].first_task = tasks;
        tasks += (run->groups + run->groups_per_task - 1) / run->groups_per_task;
    }
    return tasks;
}

static void NAME(touch_run_task)(void *arg, int64_t task, int thread) {
    const NAME(fixed_pairs) *a = arg;
    const kv_weight *w = a->runs[task].a.w;
    (void)thread;
    for (int64_t n = 0; n < a->e->n_weights; n++, w++)
        if (a->states[task * a->e->n_weights + n] == KEEPING) touch((uint8_t *)w->blocks, groups_of(w) * GROUP * w->row_bytes);
}

/* Returns whether all matrices are kept. */
static int NAME(begin_uses)(NAME(fixed_pairs) *a) {
    int64_t *state = a->states;
    int keeping = 0, kept = 1;
    for (int64_t i = 0; i < a->n_runs; i++)
        for (int64_t n = 0; n < a->e->n_weights; n++, state++)
            *state = begin_use(a->runs[i].a.w + n), keeping |= *state == KEEPING, kept &= *state == KEPT;
    if (keeping) parallel_that(a->n_runs, NAME(touch_run_task), a, 0);
    return kept;
}

static void NAME(end_uses)(const NAME(fixed_pairs) *a) {
    const int64_t *state = a->states;
    for (int64_t i = 0; i < a->n_runs; i++)
        for (int64_t n = 0; n < a->e->n_weights; n++) end_use(a->runs[i].a.w + n, *state++);
}

static void NAME(fixed_matmul_experts)(const kv_expert_products *e) {
    int64_t most = e->pairs < e->experts ? e->pairs : e->experts;
    NAME(fixed_pairs) a = {e, malloc(e->pairs * sizeof(kv_fixed *)), malloc(e->pairs * sizeof(int64_t)),
                           malloc(most * sizeof(NAME(fixed_run))), malloc(most * e->n_weights * sizeof(int64_t)), 0};
    if (!a.at || !a.beside || !a.runs || !a.states) abort();
    for (int64_t first = 0, last; first < e->pairs; first = last) {
        last = first + FIXED_PAIRS < e->pairs ? first + FIXED_PAIRS : e->pairs;
        kv_fixed *fixed = fixed_rows(NAME(fixed_runs)(&a, first, last) * (e->k / 32));
        memset(a.at, 0, e->pairs * sizeof(kv_fixed *));
        int64_t tasks = NAME(place_pairs)(&a, fixed);
        parallel((e->pairs / e->each + FIXED_ROWS - 1) / FIXED_ROWS, NAME(pairs_to_fixed_task), &a);
        int kept = NAME(begin_uses)(&a);
        parallel_that(tasks, NAME(fixed_run_task), &a, kept);
        NAME(end_uses)(&a);
    }
    free(a.at), free(a.beside), free(a.runs), free(a.states);
}
