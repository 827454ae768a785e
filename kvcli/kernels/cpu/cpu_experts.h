/* Mixtures of experts: which experts rows have, products with their matrices, and weighted sums. Included by cpu_body.h. */

static void NAME(matmul_experts)(const kv_expert_products *e) {
    int64_t total = NAME(stacked)(e->w, e->n_weights), kp = (e->k + VL - 1) / VL * VL, tasks = 0, n_runs = 0, used = 0;
    NAME(run) *runs = malloc((size_t)(e->pairs < e->experts ? e->pairs : e->experts) * 2 * sizeof(NAME(run)));
    if (!runs) abort();
    for (int64_t i = 0, first = 0; i < e->experts; first = e->end[i++]) used += e->end[i] > first;
    for (int64_t i = 0, first = 0; i < e->experts; first = e->end[i++]) {
        if (e->end[i] == first) continue;
        NAME(matmul_args) a = {e->w + i * e->apart, e->n_weights, total, e->end[i] - first, e->k, kp, e->ldx, e->ldy, 0,
                               NAME(share)(used * total), 0, e->x, e->y, NULL, e->order + first, e->each};
        n_runs = NAME(add_runs)(runs, n_runs, a, &tasks);
    }
    NAME(finish_runs)(runs, n_runs, tasks);
    free(runs);
}

/* Scores of a row's logits, and of the groups that may not be chosen from `taken` 1. `score`, `choice`: whole vectors. */
INLINE void NAME(scores)(const float *logits, const kv_routing *r, const float *bias, float *score, float *choice) {
    float most = logits[0], sum = 0;
    for (int64_t e = 1; e < r->experts; e++) most = logits[e] > most ? logits[e] : most;
    for (int64_t e = 0; e < r->experts; e++) score[e] = r->gating == SOFTMAX ? logits[e] - most : -logits[e];
    for (int64_t e = 0; e < r->experts && r->gating != CHOSEN; e += VL) STORE(score + e, NAME(exp)(LOAD(score + e)));
    for (int64_t e = 0; e < r->experts; e++) sum += score[e];
    for (int64_t e = 0; e < r->experts; e++) {
        score[e] = r->gating == SOFTMAX ? score[e] / sum : r->gating == SIGMOID ? 1.0f / (score[e] + 1.0f) : logits[e];
        choice[e] = bias ? score[e] + bias[e] : score[e];
    }
}

/* The best that is not taken, the first of equals. */
static int64_t NAME(best)(const float *x, const uint8_t *taken, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    return best;
}

/* Takes all experts but those of the groups_used groups whose best ones, two or one, have the highest sum. */
static void NAME(take_groups)(const kv_routing *r, const float *choice, float *sums, uint8_t *taken) {
    int64_t size = r->experts / r->groups;
    for (int64_t g = 0; g < r->groups; g++) {
        const float *x = choice + g * size;
        int64_t first = NAME(best)(x, taken + g * size, size), second;
        taken[g * size + first] = 1;
        second = size > 1 && r->best > 1 ? NAME(best)(x, taken + g * size, size) : -1;
        taken[g * size + first] = 0;
        sums[g] = x[first] + (second < 0 ? 0.0f : x[second]);
    }
    memset(taken, 1, r->experts);
    for (int64_t i = 0; i < r->groups_used; i++) {
        uint8_t *whole = taken + r->experts;
        int64_t g = NAME(best)(sums, whole, r->groups);
        whole[g] = 1;
        memset(taken + g * size, 0, size);
    }
}

typedef struct {
    const float *logits, *bias;
    const kv_routing *r;
    int64_t *ids;
    float *weights;
} NAME(route_args);

static void NAME(route_task)(void *arg, int64_t row, int thread) {
    const NAME(route_args) *a = arg;
    const kv_routing *r = a->r;
    int64_t padded = (r->experts + VL - 1) / VL * VL, *ids = a->ids + row * r->used;
    float *score = scratch(thread, 4 * padded), *choice = score + padded, *sums = choice + padded;
    uint8_t *taken = (uint8_t *)(sums + padded);
    float *weights = a->weights + row * r->used, sum = 0;
    memset(score, 0, padded * sizeof(float));
    memset(taken, 0, 2 * r->experts);
    NAME(scores)(a->logits + row * r->experts, r, a->bias, score, choice);
    if (r->groups > 1) NAME(take_groups)(r, choice, sums, taken);
    for (int64_t i = 0; i < r->used; i++) {
        ids[i] = NAME(best)(choice, taken, r->experts);
        taken[ids[i]] = 1;
    }
    float most = score[ids[0]];
    for (int64_t i = 1; i < r->used; i++) most = score[ids[i]] > most ? score[ids[i]] : most;
    for (int64_t i = 0; i < r->used; i++) {
        weights[i] = r->gating == CHOSEN ? NAME(exp)(SPLAT(score[ids[i]] - most))[0] : score[ids[i]];
        sum += weights[i];
    }
    if (r->gating != CHOSEN && !r->normed) sum = 1.0f;
    if (sum < 1e-20f) sum = 1e-20f;
    for (int64_t i = 0; i < r->used; i++) weights[i] = weights[i] / sum * r->scale;
}

static void NAME(route)(const float *logits, int64_t t, const kv_routing *r, const float *bias, int64_t *ids, float *weights) {
    NAME(route_args) a = {logits, bias, r, ids, weights};
    parallel(t, NAME(route_task), &a);
}

typedef struct {
    const float *y, *weights;
    int64_t n, d;
    float *out;
} NAME(mix_args);

static void NAME(mix_task)(void *arg, int64_t row, int thread) {
    const NAME(mix_args) *a = arg;
    const float *y = a->y + row * a->n * a->d;
    float *out = a->out + row * a->d;
    (void)thread;
    for (int64_t i = 0; i < a->n; i++) {
        float w = a->weights[row * a->n + i];
        for (int64_t j = 0; j < a->d; j++) out[j] = i ? out[j] + w * y[i * a->d + j] : w * y[j];
    }
}

static void NAME(mix)(const float *y, const float *weights, int64_t t, int64_t n, int64_t d, float *out) {
    NAME(mix_args) a = {y, weights, n, d, out};
    parallel(t, NAME(mix_task), &a);
}
