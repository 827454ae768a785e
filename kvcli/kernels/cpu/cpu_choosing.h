/* Which entries queries read where they do not read all. Included by cpu_attention.h; choosing.py is the specification. */

typedef struct {
    const NAME(attn_args) *a;
    uint8_t *read;
} NAME(choosing);

/* The product of a query with the codes of a mean. */
INLINE float NAME(mean_product)(const float *q, const uint8_t *codes, int64_t dim) {
    vf sum = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + VL <= dim; i += VL) sum = FMA(LOAD(q + i), FLOATS(NAME(s8)(codes + i)), sum);
    for (; i < dim; i++) rest += q[i] * (float)(int8_t)codes[i];
    return NAME(hsum)(sum) + rest;
}

/* The mean of the queries of tokens [t0, t1) and of the group of a KV head. */
INLINE void NAME(pool_queries)(const NAME(attn_args) *a, int64_t head, int64_t t0, int64_t t1, float *out) {
    int64_t dim = a->kv->dim_k;
    memset(out, 0, dim * sizeof(float));
    for (int64_t t = t0; t < t1; t++)
        for (int64_t h = head * a->group; h < (head + 1) * a->group; h++)
            for (int64_t i = 0; i < dim; i++) out[i] += a->q[t * a->ldq + h * dim + i];
    for (int64_t i = 0; i < dim; i++) out[i] /= (float)(a->group * (t1 - t0));
}

/* The k-th largest of n numbers, 1 <= k <= n, which change places (Hoare's selection). */
INLINE float NAME(kth_largest)(float *x, int64_t n, int64_t k) {
    int64_t lo = 0, hi = n - 1;
    while (lo < hi) {
        float pivot = x[lo + (hi - lo) / 2];
        int64_t i = lo, j = hi;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                float swapped = x[i];
                x[i++] = x[j], x[j--] = swapped;
            }
        }
        if (k - 1 <= j) hi = j;
        else if (k - 1 >= i) lo = i;
        else break;
    }
    return x[k - 1];
}

/* What a block of queries reads, by one head. */
static void NAME(choose_task)(void *arg, int64_t task, int thread) {
    const NAME(choosing) *c = arg;
    const NAME(attn_args) *a = c->a;
    const kv_paged *kv = a->kv;
    int64_t head = task % kv->kv_heads, block = task / kv->kv_heads, n = kv->n_entries, dim = kv->dim_k, asked = 0, pitch = (dim + 15) / 16 * 16;
    int64_t t0 = block * CHOICE_BLOCK - a->start % CHOICE_BLOCK, t1 = t0 + CHOICE_BLOCK < a->t ? t0 + CHOICE_BLOCK : a->t;
    float *q = scratch(thread, (size_t)(dim + 2 * n)), *scores = q + dim, *sorted = scores + n, most = -INFINITY;
    uint8_t *read = c->read + task * n;
    NAME(pool_queries)(a, head, t0 < 0 ? 0 : t0, t1, q);
    for (int64_t e = 0; e < n; e++) {
        const kv_entry *entry = kv->entries + e;
        if (!(read[e] = !entry->summary)) {
            const uint8_t *told = (const uint8_t *)(intptr_t)entry->summary + kv->summary_offset;
            const float *scales = (const float *)(told + kv->kv_heads * kv->means * pitch);
            float best = -INFINITY;
            for (int64_t m = head * kv->means; m < (head + 1) * kv->means; m++) {
                float score = NAME(mean_product)(q, told + m * pitch, dim) * scales[m] * a->scale;
                best = score > best ? score : best;
            }
            scores[e] = sorted[asked++] = best;
            most = best > most ? best : most;
        }
    }
    if (!asked) return;
    int64_t left = kv->pages < asked ? kv->pages : asked;
    float least = left ? NAME(kth_largest)(sorted, asked, left) : most + logf((float)kv->threshold);
    for (int64_t e = 0; e < n; e++)
        if (kv->entries[e].summary && scores[e] > least) read[e] = 1, left--;
    for (int64_t e = 0; e < n; e++) /* of equal ones the earlier */
        if (kv->entries[e].summary && scores[e] == least && (!kv->pages || left-- > 0)) read[e] = 1;
}

static void NAME(choose)(NAME(attn_args) *a) {
    int64_t blocks = (a->start % CHOICE_BLOCK + a->t + CHOICE_BLOCK - 1) / CHOICE_BLOCK, tasks = blocks * a->kv->kv_heads;
    a->read = malloc((size_t)(tasks * a->kv->n_entries));
    if (!a->read) abort();
    NAME(choosing) c = {a, a->read};
    parallel(tasks, NAME(choose_task), &c);
}
