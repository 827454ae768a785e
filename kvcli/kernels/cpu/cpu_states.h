/* Layers that keep a state: rows follow each other, columns or heads are shared out to threads. Included by cpu_body.h. */

typedef struct {
    const float *x, *weight, *bias;
    int64_t ldx, d, kernel, gated; /* gated: b, c, z side by side; else rows are convolved as they are, and activated */
    const kv_carried *carried;
    int64_t n;
    float *out;
} NAME(short_conv_args);

/* out[0..n) = SiLU of x[0..n). */
static void NAME(silu)(const float *x, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i += VL) {
        float part[VL] = {0};
        int64_t count = n - i < VL ? n - i : VL;
        memcpy(part, x + i, count * sizeof(float));
        vf v = LOAD(part), y = v / (NAME(exp)(-v) + 1.0f);
        memcpy(out + i, &y, count * sizeof(float));
    }
}

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
            const float *b = a->x + t * a->ldx + first, *c = a->gated ? b + a->d : b, *z = c + a->d;
            float *out = a->out + t * a->d + first, sum[CONV_COLUMNS];
            if (a->gated)
                for (int64_t j = 0; j < count; j++) rows[at][j] = b[j] * z[j];
            else
                for (int64_t j = 0; j < count; j++) rows[at][j] = b[j];
            at = at == past ? 0 : at + 1; /* the oldest row */
            for (int64_t j = 0; j < count; j++) sum[j] = taps[0][j] * rows[at][j];
            for (int64_t k = 1, r = at; k <= past; k++) {
                r = r == past ? 0 : r + 1;
                for (int64_t j = 0; j < count; j++) sum[j] += taps[k][j] * rows[r][j];
            }
            if (a->bias)
                for (int64_t j = 0; j < count; j++) sum[j] += a->bias[first + j];
            if (a->gated)
                for (int64_t j = 0; j < count; j++) out[j] = c[j] * sum[j];
            else
                NAME(silu)(sum, count, out);
        }
        for (int64_t k = 0; k < past; k++) {
            at = at == past ? 0 : at + 1;
            for (int64_t j = 0; j < count; j++) e->target[k * a->d + first + j] = rows[at][j];
        }
    }
}

static void NAME(short_conv)(const float *x, int64_t ldx, const float *weight, const float *bias, int64_t d, int64_t kernel,
                             const kv_carried *carried, int64_t n, float *out) {
    NAME(short_conv_args) a = {x, weight, bias, ldx, d, kernel, 1, carried, n, out};
    parallel((d + CONV_COLUMNS - 1) / CONV_COLUMNS, NAME(short_conv_task), &a);
}

typedef struct {
    const float *x, *mixed;
    int64_t ldx;
    const kv_delta *layer;
    const kv_carried *carried;
    int64_t n;
    float *out;
} NAME(delta_args);

/* A vector of unit length, times `scale`. */
static void NAME(unit)(const float *x, int64_t d, float scale, float *out) {
    float factor = scale / sqrtf(NAME(sum)(x, 0, 1, d) + 1e-6f);
    for (int64_t i = 0; i < d; i++) out[i] = x[i] * factor;
}

/* One value head: its matrix [dim_k, dim_v] goes through the rows; see reference/deltanet.py. */
static void NAME(delta_task)(void *argument, int64_t head, int thread) {
    (void)thread;
    const NAME(delta_args) *a = argument;
    const kv_delta *l = a->layer;
    int64_t dk = l->dim_k, dv = l->dim_v, keys = l->key_heads * dk, channels = 2 * keys + l->value_heads * dv;
    int64_t key_head = l->tiled ? head % l->key_heads : head / (l->value_heads / l->key_heads);
    int64_t skip = (l->kernel - 1) * channels + head * dk * dv;
    float q[MAX_HEAD], k[MAX_HEAD], change[MAX_HEAD], sum[MAX_HEAD], gates[MAX_HEAD];
    for (const kv_carried *e = a->carried; e < a->carried + a->n; e++) {
        float *state = e->target + skip;
        if (!e->source) memset(state, 0, dk * dv * sizeof(float));
        else if (e->source != e->target) memcpy(state, e->source + skip, dk * dv * sizeof(float));
        for (int64_t t = e->lo; t < e->hi; t++) {
            const float *mixed = a->mixed + t * channels, *v = mixed + 2 * keys + head * dv;
            const float *z = a->x + t * a->ldx + channels, *b = z + l->value_heads * dv, *time = b + l->value_heads;
            NAME(unit)(mixed + key_head * dk, dk, 1.0f / sqrtf((float)dk), q);
            NAME(unit)(mixed + keys + key_head * dk, dk, 1.0f, k);
            float step = time[head] + l->time_bias[head];
            float decay = expf(l->decay[head] * (step > 20 ? step : log1pf(expf(step))));
            float beta = 1.0f / (1.0f + expf(-b[head]));
            memset(sum, 0, dv * sizeof(float));
            for (int64_t i = 0; i < dk; i++) {
                float *row = state + i * dv;
                for (int64_t j = 0; j < dv; j++) {
                    row[j] *= decay;
                    sum[j] += row[j] * k[i];
                }
            }
            for (int64_t j = 0; j < dv; j++) change[j] = (v[j] - sum[j]) * beta;
            memset(sum, 0, dv * sizeof(float));
            for (int64_t i = 0; i < dk; i++) {
                float *row = state + i * dv;
                for (int64_t j = 0; j < dv; j++) {
                    row[j] += k[i] * change[j];
                    sum[j] += row[j] * q[i];
                }
            }
            float root = 1.0f / sqrtf(NAME(sum)(sum, 0, 1, dv) / dv + l->eps);
            float *out = a->out + (t * l->value_heads + head) * dv;
            NAME(silu)(z + head * dv, dv, gates);
            for (int64_t j = 0; j < dv; j++) out[j] = sum[j] * root * l->norm[j] * gates[j];
        }
    }
}

static void NAME(delta_net)(const float *x, int64_t ldx, const kv_delta *layer, const kv_carried *carried, int64_t n, float *mixed,
                            float *out) {
    int64_t channels = 2 * layer->key_heads * layer->dim_k + layer->value_heads * layer->dim_v;
    NAME(short_conv_args) conv = {x, layer->conv, NULL, ldx, channels, layer->kernel, 0, carried, n, mixed};
    parallel((channels + CONV_COLUMNS - 1) / CONV_COLUMNS, NAME(short_conv_task), &conv);
    NAME(delta_args) a = {x, mixed, ldx, layer, carried, n, out};
    parallel(layer->value_heads, NAME(delta_task), &a);
}

typedef struct {
    const float *x, *mixed;
    int64_t ldx;
    const kv_mamba_layer *layer;
    const kv_carried *carried;
    int64_t n;
    float *out;
} NAME(mamba_args);

/* One head: its matrix [state, dim] goes through the rows; see reference/mamba.py. */
static void NAME(mamba_task)(void *argument, int64_t head, int thread) {
    (void)thread;
    const NAME(mamba_args) *a = argument;
    const kv_mamba_layer *l = a->layer;
    int64_t d = l->dim, n = l->state, inner = l->heads * d, channels = inner + 2 * l->groups * n;
    int64_t keys = inner + head / (l->heads / l->groups) * n, skip = (l->kernel - 1) * channels + head * n * d;
    float taken[MAX_HEAD], sum[MAX_HEAD];
    for (const kv_carried *e = a->carried; e < a->carried + a->n; e++) {
        float *state = e->target + skip;
        if (!e->source) memset(state, 0, n * d * sizeof(float));
        else if (e->source != e->target) memcpy(state, e->source + skip, n * d * sizeof(float));
        for (int64_t t = e->lo; t < e->hi; t++) {
            const float *mixed = a->mixed + t * channels, *v = mixed + head * d, *k = mixed + keys, *q = k + l->groups * n;
            float time = a->x[t * a->ldx + inner + channels + head] + l->time_bias[head];
            float step = time > 20 ? time : log1pf(expf(time)), decay = expf(l->decay[head] * step);
            float *out = a->out + t * inner + head * d;
            for (int64_t j = 0; j < d; j++) taken[j] = v[j] * step;
            memset(sum, 0, d * sizeof(float));
            for (int64_t i = 0; i < n; i++) {
                float *row = state + i * d;
                for (int64_t j = 0; j < d; j++) {
                    row[j] = row[j] * decay + k[i] * taken[j];
                    sum[j] += row[j] * q[i];
                }
            }
            for (int64_t j = 0; j < d; j++) out[j] = sum[j] + l->skip[head] * v[j];
        }
    }
}

/* One group of one row of what heads give: gated, then normed, if there is a norm. */
static void NAME(mamba_gate_task)(void *argument, int64_t task, int thread) {
    (void)thread;
    const NAME(mamba_args) *a = argument;
    const kv_mamba_layer *l = a->layer;
    int64_t inner = l->heads * l->dim, width = inner / l->groups, t = task / l->groups, first = task % l->groups * width;
    float *out = a->out + t * inner + first, gates[CONV_COLUMNS];
    const float *z = a->x + t * a->ldx + first, *norm = l->norm ? l->norm + first : NULL;
    for (int64_t i = 0; i < width; i += CONV_COLUMNS) {
        int64_t count = width - i < CONV_COLUMNS ? width - i : CONV_COLUMNS;
        NAME(silu)(z + i, count, gates);
        for (int64_t j = 0; j < count; j++) out[i + j] *= gates[j];
    }
    if (!l->norm) return;
    float root = 1.0f / sqrtf(NAME(sum)(out, 0, 1, width) / width + l->eps);
    for (int64_t i = 0; i < width; i++) out[i] *= root * norm[i];
}

static void NAME(mamba)(const float *x, int64_t ldx, const kv_mamba_layer *layer, const kv_carried *carried, int64_t n,
                        float *mixed, float *out) {
    int64_t inner = layer->heads * layer->dim, channels = inner + 2 * layer->groups * layer->state;
    NAME(short_conv_args) conv = {
        x + inner, layer->conv, layer->conv_bias, ldx, channels, layer->kernel, 0, carried, n, mixed};
    parallel((channels + CONV_COLUMNS - 1) / CONV_COLUMNS, NAME(short_conv_task), &conv);
    NAME(mamba_args) a = {x, mixed, ldx, layer, carried, n, out};
    parallel(layer->heads, NAME(mamba_task), &a);
    parallel(n ? carried[n - 1].hi * layer->groups : 0, NAME(mamba_gate_task), &a);
}
