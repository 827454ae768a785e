/* Layers that keep a state: rows follow each other, columns or heads are shared out to threads. Included by cpu_body.h. */

typedef struct {
    const float *x, *weight, *bias;
    int64_t ldx, d, kernel;
    const kv_carried *carried;
    int64_t n;
    float *out;
} NAME(short_conv_args);

static void NAME(short_conv_task)(void *argument, int64_t task, int thread) {
    (void)thread;
    const NAME(short_conv_args) *a = argument;
    int64_t first = task * CONV_COLUMNS, count = a->d - first < CONV_COLUMNS ? a->d - first : CONV_COLUMNS;
    int64_t past = a->kernel - 1;
    float taps[MAX_CONV][CONV_COLUMNS], rows[MAX_CONV][CONV_COLUMNS]; /* rows: those before the row at hand, in a ring */
    for (int64_t j = 0; j < count; j++)
        for (int64_t k = 0; k < a->kernel; k++) taps[k][j] = a->weight[(first + j) * a->kernel + k];
    for (const kv_carried *e = a->carried; e < a->carried + a->n; e++) {
        for (int64_t k = 0; k < past; k++)
            for (int64_t j = 0; j < count; j++) rows[k][j] = e->source ? e->source[k * a->d + first + j] : 0;
        int64_t at = past; /* of the ring: where the row at hand goes */
        for (int64_t t = e->lo; t < e->hi; t++) {
            const float *b = a->x + t * a->ldx + first, *c = b + a->d, *z = c + a->d;
            float *out = a->out + t * a->d + first, sum[CONV_COLUMNS];
            for (int64_t j = 0; j < count; j++) rows[at][j] = b[j] * z[j];
            at = at == past ? 0 : at + 1; /* the oldest row */
            for (int64_t j = 0; j < count; j++) sum[j] = taps[0][j] * rows[at][j];
            for (int64_t k = 1, r = at; k <= past; k++) {
                r = r == past ? 0 : r + 1;
                for (int64_t j = 0; j < count; j++) sum[j] += taps[k][j] * rows[r][j];
            }
            if (a->bias)
                for (int64_t j = 0; j < count; j++) sum[j] += a->bias[first + j];
            for (int64_t j = 0; j < count; j++) out[j] = c[j] * sum[j];
        }
        for (int64_t k = 0; k < past; k++) {
            at = at == past ? 0 : at + 1;
            for (int64_t j = 0; j < count; j++) e->target[k * a->d + first + j] = rows[at][j];
        }
    }
}

static void NAME(short_conv)(const float *x, int64_t ldx, const float *weight, const float *bias, int64_t d, int64_t kernel,
                             const kv_carried *carried, int64_t n, float *out) {
    NAME(short_conv_args) a = {x, weight, bias, ldx, d, kernel, carried, n, out};
    parallel((d + CONV_COLUMNS - 1) / CONV_COLUMNS, NAME(short_conv_task), &a);
}
