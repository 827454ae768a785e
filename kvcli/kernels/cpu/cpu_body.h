/* Kernels for one instruction set. Included by cpu.c with NAME(x), VL (floats per vector) and ROWS_TILE (rows of x
 * per register tile) defined. Vectors are GCC/Clang vector extensions, so one text serves every target. */

#define vf NAME(vf)
#define vi NAME(vi)
typedef float vf __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VL), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define LOAD(p) (*(const vf *)(p))
#define STORE(p, v) (*(vf *)(p) = (v))
#define SPLAT(x) ((x) - (vf){0}) /* x - 0 is x, so the compiler keeps only the broadcast */
#define FLOATS(ints) __builtin_convertvector(ints, vf)

INLINE vf NAME(fma)(vf a, vf b, vf c) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
#define FMA NAME(fma)

/* Sum of the lanes, always in the same order (halves, quarters, ...). */
INLINE float NAME(hsum)(vf v) {
#if VL == 16 && defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif VL == 8 && defined(__AVX__)
    __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
    float t[VL];
    memcpy(t, &v, sizeof t);
    for (int half = VL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
#endif
}

/* Sums of the lanes of VL vectors, as one vector. */
INLINE vf NAME(hsums)(const vf *v) {
#if VL == 16 && defined(__AVX512F__)
    __m512 t[8], u[4];
    for (int i = 0; i < 8; i++)
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]),
                             _mm512_unpackhi_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
        u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
    __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
#else
    vf sums;
    for (int i = 0; i < VL; i++) sums[i] = NAME(hsum)(v[i]);
    return sums;
#endif
}

INLINE float NAME(half)(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    return soft_half_to_float(h);
#endif
}
#define HALF(p) NAME(half)(read16(p))

#include "cpu_blocks.h"

/* ---- matrix product: out = x . W^T -------------------------------------------------------------------------- */

#define PANEL 16      /* weight rows decoded whole when x has several rows */
#define WEIGHT_TILE 4 /* weight rows per register tile */
#define FEW (VL == 16 ? 8 : 4) /* rows of x whose sums have room in registers, with FEW_TILE weight rows */
#define FEW_TILE 2
#if VL >= 8 /* loaded once for several uses, not as an operand of each */
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x) (void)(x)
#endif

/* From each format: decode_X, n weights to floats; dot_X, `cols` weight rows against one row of x; and few_X, FEW_TILE
 * weight rows against `rows` rows of x, whose vectors stand beside each other: [k / VL, rows, VL]. An output is one
 * accumulator, fed in order of k; the last part of a row that is not a multiple of 32 is padded with zeros. */
#define FORMAT(name, elements, size)                                                                                  \
    static void NAME(decode_##name)(const uint8_t *b, float *out, int64_t n) {                                        \
        vf part[VECTORS];                                                                                             \
        int64_t i = 0;                                                                                                \
        for (; i + 32 <= n; i += 32) {                                                                                \
            NAME(part_##name)(b + i / elements * size, (int)(i % elements / 32), part);                               \
            for (int j = 0; j < VECTORS; j++) STORE(out + i + j * VL, part[j]);                                       \
        }                                                                                                             \
        if (elements == 1 && i < n) {                                                                                 \
            _Alignas(64) uint8_t tail[32 * 8] = {0};                                                                  \
            memcpy(tail, b + i * size, (n - i) * size);                                                               \
            NAME(part_##name)(tail, 0, part);                                                                         \
            memcpy(out + i, part, (n - i) * sizeof(float));                                                           \
        }                                                                                                             \
    }                                                                                                                 \
    INLINE void NAME(dot_##name)(const uint8_t *w, int64_t row_bytes, const float *x, int64_t k, vf *out, int cols) { \
        vf acc[WEIGHT_TILE] = {0};                                                                                    \
        int64_t i = 0;                                                                                                \
        const int step = elements > 32 ? elements : 32;                                                               \
        for (; i + step <= k; i += step) {                                                                            \
            const uint8_t *b = w + (elements == 1 ? i * size : i / elements * size);                                  \
            for (int p = 0; p < step / 32; p++)                                                                       \
                for (int c = 0; c < cols; c++) {                                                                      \
                    vf part[VECTORS];                                                                                 \
                    NAME(part_##name)(b + c * row_bytes, p, part);                                                    \
                    for (int j = 0; j < VECTORS; j++) acc[c] = FMA(part[j], LOAD(x + i + p * 32 + j * VL), acc[c]);   \
                }                                                                                                     \
        }                                                                                                             \
        if (i < k) {                                                                                                  \
            float wt[32], xt[32] = {0};                                                                               \
            memcpy(xt, x + i, (k - i) * sizeof(float));                                                               \
            for (int c = 0; c < cols; c++) {                                                                          \
                memset(wt, 0, sizeof wt);                                                                             \
                NAME(decode_##name)(w + c * row_bytes + i / elements * size, wt, k - i);                              \
                for (int j = 0; j * VL < k - i; j++) acc[c] = FMA(LOAD(wt + j * VL), LOAD(xt + j * VL), acc[c]);      \
            }                                                                                                         \
        }                                                                                                             \
        for (int c = 0; c < cols; c++) out[c] = acc[c];                                                               \
    }                                                                                                                 \
    INLINE void NAME(few_##name)(const uint8_t *w, int64_t row_bytes, const float *x, int64_t k, vf *out, int rows) { \
        vf acc[FEW][FEW_TILE] = {0};                                                                                  \
        int64_t i = 0;                                                                                                \
        const int step = elements > 32 ? elements : 32;                                                               \
        for (; i + step <= k; i += step) {                                                                            \
            const uint8_t *b = w + (elements == 1 ? i * size : i / elements * size);                                  \
            for (int p = 0; p < step / 32; p++) {                                                                     \
                const float *xs = x + (i + p * 32) * rows;                                                            \
                vf part[FEW_TILE][VECTORS];                                                                           \
                for (int c = 0; c < FEW_TILE; c++) NAME(part_##name)(b + c * row_bytes, p, part[c]);                  \
                for (int j = 0; j < VECTORS; j++)                                                                     \
                    UNROLL for (int r = 0; r < rows; r++) {                                                           \
                        vf xv = LOAD(xs + (j * rows + r) * VL);                                                       \
                        IN_REGISTER(xv);                                                                              \
                        for (int c = 0; c < FEW_TILE; c++) acc[r][c] = FMA(part[c][j], xv, acc[r][c]);                \
                    }                                                                                                 \
            }                                                                                                         \
        }                                                                                                             \
        if (i < k) {                                                                                                  \
            float wt[FEW_TILE][32] = {0};                                                                             \
            for (int c = 0; c < FEW_TILE; c++)                                                                        \
                NAME(decode_##name)(w + c * row_bytes + i / elements * size, wt[c], k - i);                           \
            for (int j = 0; j * VL < k - i; j++)                                                                      \
                UNROLL for (int r = 0; r < rows; r++) {                                                               \
                    vf xv = LOAD(x + i * rows + (j * rows + r) * VL);                                                 \
                    for (int c = 0; c < FEW_TILE; c++) acc[r][c] = FMA(LOAD(wt[c] + j * VL), xv, acc[r][c]);          \
                }                                                                                                     \
        }                                                                                                             \
        UNROLL for (int r = 0; r < rows; r++)                                                                         \
            for (int c = 0; c < FEW_TILE; c++) out[r * FEW_TILE + c] = acc[r][c];                                     \
    }                                                                                                                 \
    static void NAME(few4_##name)(const uint8_t *w, int64_t row_bytes, const float *x, int64_t k, vf *out) {          \
        NAME(few_##name)(w, row_bytes, x, k, out, 4);                                                                 \
    }                                                                                                                 \
    static void NAME(few8_##name)(const uint8_t *w, int64_t row_bytes, const float *x, int64_t k, vf *out) {          \
        NAME(few_##name)(w, row_bytes, x, k, out, FEW);                                                               \
    }                                                                                                                 \
    static void NAME(dot4_##name)(const uint8_t *w, int64_t row_bytes, const float *x, int64_t k, vf *out) {          \
        NAME(dot_##name)(w, row_bytes, x, k, out, WEIGHT_TILE);                                                       \
    }                                                                                                                 \
    static void NAME(dot1_##name)(const uint8_t *w, int64_t row_bytes, const float *x, int64_t k, vf *out) {          \
        NAME(dot_##name)(w, row_bytes, x, k, out, 1);                                                                 \
    }

typedef void (*NAME(decode_fn))(const uint8_t *, float *, int64_t);
typedef void (*NAME(dot_fn))(const uint8_t *, int64_t, const float *, int64_t, vf *);

#define FORMAT_OF(name, lower, id, elements, size) FORMAT(lower, elements, size)
BLOCK_FORMATS(FORMAT_OF)
#undef FORMAT_OF
#undef FORMAT

typedef struct {
    NAME(decode_fn) decode;
    NAME(dot_fn) dot4, dot1, few8, few4;
} NAME(format_ops);

static const NAME(format_ops) *NAME(ops)(int64_t format) {
#define OPS(upper, name, id, elements, size) \
    [id] = {NAME(decode_##name), NAME(dot4_##name), NAME(dot1_##name), NAME(few8_##name), NAME(few4_##name)},
    static const NAME(format_ops) table[] = {BLOCK_FORMATS(OPS)};
#undef OPS
    return table + format;
}

typedef struct { /* m rows of x times the stacked rows of `n_weights` matrices */
    const kv_weight *w;
    int64_t n_weights, total, m, k, kp, ldx, ldy, accumulate, rows_per_task, few;
    const float *x;
    float *y;
    float *copy; /* of x, as the kernel wants it; NULL = it reads x */
    const int64_t *pairs; /* row i of x and y is row pairs[i] / each and pairs[i] there; NULL = i in both */
    int64_t each;
} NAME(matmul_args);

INLINE const float *NAME(x_row)(const NAME(matmul_args) *a, int64_t m) {
    return a->x + (a->pairs ? a->pairs[m] / a->each : m) * a->ldx;
}

/* The weight matrix and row that stacked row n falls into; returns how many rows follow in that matrix. */
INLINE int64_t NAME(locate)(const NAME(matmul_args) *a, int64_t n, const kv_weight **w, int64_t *row) {
    *w = a->w;
    while (n >= (*w)->rows) n -= (*w)->rows, ++*w;
    *row = n;
    return (*w)->rows - n;
}

INLINE void NAME(put)(const NAME(matmul_args) *a, int64_t m, int64_t n, vf acc) {
    float *y = a->y + (a->pairs ? a->pairs[m] : m) * a->ldy + n, sum = NAME(hsum)(acc);
    *y = a->accumulate ? *y + sum : sum;
}

/* One row of x: weights go from packed bytes to products in registers. */
static void NAME(vector_task)(void *arg, int64_t task, int thread) {
    const NAME(matmul_args) *a = arg;
    const float *x = NAME(x_row)(a, 0);
    int64_t end = (task + 1) * a->rows_per_task < a->total ? (task + 1) * a->rows_per_task : a->total;
    (void)thread;
    for (int64_t n = task * a->rows_per_task; n < end;) {
        const kv_weight *w;
        int64_t row, left = NAME(locate)(a, n, &w, &row);
        const NAME(format_ops) *ops = NAME(ops)(w->format);
        if (left > end - n) left = end - n;
        for (; left > 0;) {
            int cols = left >= WEIGHT_TILE ? WEIGHT_TILE : 1;
            vf acc[WEIGHT_TILE];
            (cols == 1 ? ops->dot1 : ops->dot4)(w->blocks + row * w->row_bytes, w->row_bytes, x, a->k, acc);
            for (int c = 0; c < cols; c++) NAME(put)(a, 0, n + c, acc[c]);
            n += cols, row += cols, left -= cols;
        }
    }
}

/* acc[i][j] += x row i . w row j over n elements (a multiple of VL), in order of k. */
INLINE void NAME(tile)(vf acc[ROWS_TILE][WEIGHT_TILE], const float *x, int64_t ldx, const float *w, int64_t n, int rows) {
    for (int64_t k = 0; k < n; k += VL) {
        vf wv[WEIGHT_TILE];
        for (int j = 0; j < WEIGHT_TILE; j++) wv[j] = LOAD(w + j * n + k);
        for (int i = 0; i < rows; i++) {
            vf xv = LOAD(x + i * ldx + k);
            for (int j = 0; j < WEIGHT_TILE; j++) acc[i][j] = FMA(wv[j], xv, acc[i][j]);
        }
    }
}

/* A few rows of x: as one row, with weights that are decoded once for all of them. */
static void NAME(few_task)(void *arg, int64_t task, int thread) {
    const NAME(matmul_args) *a = arg;
    int64_t end = (task + 1) * a->rows_per_task < a->total ? (task + 1) * a->rows_per_task : a->total;
    (void)thread;
    for (int64_t n = task * a->rows_per_task; n < end;) {
        const kv_weight *w;
        int64_t row, left = NAME(locate)(a, n, &w, &row);
        const NAME(format_ops) *ops = NAME(ops)(w->format);
        if (left > end - n) left = end - n;
        for (int cols; left > 0; n += cols, row += cols, left -= cols) {
            vf acc[FEW * FEW_TILE];
            cols = left >= FEW_TILE ? FEW_TILE : 1; /* a single row stands in for the other, too */
            (a->few > 4 ? ops->few8 : ops->few4)(w->blocks + row * w->row_bytes, cols > 1 ? w->row_bytes : 0, a->copy, a->k, acc);
            for (int64_t m = 0; m < a->m; m++)
                for (int c = 0; c < cols; c++) NAME(put)(a, m, n + c, acc[m * FEW_TILE + c]);
        }
    }
}

static float *NAME(floats)(int64_t n) {
    float *out = aligned_alloc(64, (size_t)(n + 15) / 16 * 64);
    if (!out) abort();
    return out;
}

/* x as few_X wants it: [ceil(k / VL), few, VL], zeros where there is nothing. */
static float *NAME(side_by_side)(const NAME(matmul_args) *a) {
    float *out = NAME(floats)(a->kp * a->few);
    for (int64_t r = 0; r < a->few; r++) {
        const float *x = r < a->m ? NAME(x_row)(a, r) : NULL;
        for (int64_t i = 0; i < a->k; i += VL)
            for (int64_t j = 0; j < VL; j++) out[i * a->few + r * VL + j] = x && i + j < a->k ? x[i + j] : 0.0f;
    }
    return out;
}

/* x as rows that stand behind each other, padded with zeros. */
static float *NAME(gathered)(const NAME(matmul_args) *a) {
    float *out = NAME(floats)(a->m * a->kp);
    for (int64_t i = 0; i < a->m; i++) {
        memcpy(out + i * a->kp, NAME(x_row)(a, i), a->k * sizeof(float));
        memset(out + i * a->kp + a->k, 0, (a->kp - a->k) * sizeof(float));
    }
    return out;
}

/* Several rows of x: decode a panel of weight rows once, then go over all of x. */
static void NAME(panel_task)(void *arg, int64_t task, int thread) {
    const NAME(matmul_args) *a = arg;
    int64_t first = task * PANEL, count = a->total - first < PANEL ? a->total - first : PANEL;
    float *panel = scratch(thread, (size_t)PANEL * a->kp);
    for (int64_t j = 0; j < PANEL; j++) {
        float *out = panel + j * a->kp;
        if (j < count) {
            const kv_weight *w;
            int64_t row;
            NAME(locate)(a, first + j, &w, &row);
            NAME(ops)(w->format)->decode(w->blocks + row * w->row_bytes, out, a->k);
            memset(out + a->k, 0, (a->kp - a->k) * sizeof(float));
        } else {
            memset(out, 0, a->kp * sizeof(float));
        }
    }
    int64_t ldx = a->copy ? a->kp : a->ldx; /* without a copy rows are whole vectors, one behind the other */
    for (int64_t m = 0; m < a->m; m += ROWS_TILE) {
        const float *x = (a->copy ? a->copy : a->x) + m * ldx;
        int rows = a->m - m < ROWS_TILE ? (int)(a->m - m) : ROWS_TILE;
        for (int64_t j = 0; j < count; j += WEIGHT_TILE) {
            vf acc[ROWS_TILE][WEIGHT_TILE] = {0};
            switch (rows) {
            case 1: NAME(tile)(acc, x, ldx, panel + j * a->kp, a->kp, 1); break;
            case 2: NAME(tile)(acc, x, ldx, panel + j * a->kp, a->kp, 2); break;
#if ROWS_TILE == 4
            case 3: NAME(tile)(acc, x, ldx, panel + j * a->kp, a->kp, 3); break;
            case 4: NAME(tile)(acc, x, ldx, panel + j * a->kp, a->kp, 4); break;
#endif
            }
            for (int i = 0; i < rows; i++)
                for (int c = 0; c < WEIGHT_TILE && j + c < count; c++) NAME(put)(a, m + i, first + j + c, acc[i][c]);
        }
    }
}

typedef struct { /* a product as tasks, those from `first_task` on */
    NAME(matmul_args) a;
    task_fn task;
    int64_t first_task;
} NAME(run);

typedef struct {
    const NAME(run) *runs;
    int64_t n_runs;
} NAME(runs);

static void NAME(run_task)(void *arg, int64_t task, int thread) {
    const NAME(runs) *all = arg;
    const NAME(run) *run = all->runs + all->n_runs - 1;
    while (task < run->first_task) run--;
    run->task((void *)&run->a, task - run->first_task, thread);
}

/* The product as one run, or as two of a few rows each, behind those there are; returns how many there are then. `tasks`:
 * their number, which grows. */
static int64_t NAME(add_runs)(NAME(run) *runs, int64_t n_runs, NAME(matmul_args) a, int64_t *tasks) {
    int64_t rows = a.m, most = rows > 1 && rows <= 2 * FEW ? FEW : rows;
    for (int64_t first = 0; first < rows; first += most) {
        NAME(run) *run = runs + n_runs++;
        run->a = a, run->first_task = *tasks;
        run->a.m = rows - first < most ? rows - first : most;
        if (a.pairs) run->a.pairs = a.pairs + first;
        else run->a.x = a.x + first * a.ldx, run->a.y = a.y + first * a.ldy;
        if (rows == 1) {
            run->task = NAME(vector_task);
        } else if (most < rows || rows <= FEW) {
            run->a.few = run->a.m > 4 ? FEW : 4, run->a.copy = NAME(side_by_side)(&run->a);
            run->task = NAME(few_task);
        } else {
            if (a.pairs || a.kp != a.k) run->a.copy = NAME(gathered)(&run->a);
            run->task = NAME(panel_task);
        }
        int64_t each = run->task == NAME(panel_task) ? PANEL : a.rows_per_task;
        *tasks += (a.total + each - 1) / each;
    }
    return n_runs;
}

static void NAME(finish_runs)(NAME(run) *runs, int64_t n_runs, int64_t tasks) {
    NAME(runs) all = {runs, n_runs};
    parallel(tasks, NAME(run_task), &all);
    for (int64_t i = 0; i < n_runs; i++) free(runs[i].a.copy);
}

/* Weight rows of a task, of so many in all. */
static int64_t NAME(share)(int64_t rows) {
    int64_t share = rows / (pool.tuner.limit * 8) / WEIGHT_TILE * WEIGHT_TILE;
    return share < 16 ? 16 : share;
}

static int64_t NAME(stacked)(const kv_weight *w, int64_t n_weights) {
    int64_t total = 0;
    for (int64_t i = 0; i < n_weights; i++) total += w[i].rows;
    return total;
}

static void NAME(matmul)(const kv_weight *w, int64_t n_weights, const float *x, int64_t m, int64_t k, int64_t ldx,
                         float *y, int64_t ldy, int64_t accumulate) {
    int64_t total = NAME(stacked)(w, n_weights), kp = (k + VL - 1) / VL * VL, tasks = 0;
    NAME(matmul_args) a = {w, n_weights, total, m, k, kp, ldx, ldy, accumulate, NAME(share)(total), 0, x, y, NULL, NULL, 1};
    NAME(run) runs[2];
    int64_t n_runs = NAME(add_runs)(runs, 0, a, &tasks);
    NAME(finish_runs)(runs, n_runs, tasks);
}

static void NAME(rows)(const kv_weight *w, const int64_t *ids, int64_t n, int64_t k, float scale, float *out) {
    NAME(decode_fn) decode = NAME(ops)(w->format)->decode;
    for (int64_t i = 0; i < n; i++) {
        decode(w->blocks + ids[i] * w->row_bytes, out + i * k, k);
        if (scale != 1.0f)
            for (int64_t j = 0; j < k; j++) out[i * k + j] *= scale;
    }
}

/* ---- pointwise ---------------------------------------------------------------------------------------------- */

/* e^x for x <= 88, within 2 ulp; below -87.3 it is 0 (Cephes' polynomial, range reduced by ln 2 in two parts). */
INLINE vf NAME(exp)(vf x) {
    vi tiny = x < -87.3f, huge = x > 88.0f;
    x = (vf)(((vi)x & ~tiny) | ((vi)SPLAT(-87.3f) & tiny));
    x = (vf)(((vi)x & ~huge) | ((vi)SPLAT(88.0f) & huge));
    vf scaled = x * 1.44269504088896341f + 12582912.0f; /* round to nearest by the 1.5 * 2^23 trick */
    vf n = scaled - 12582912.0f;
    vi exponent = (vi)scaled << 23;
    x = FMA(n, SPLAT(-0.693359375f), x);
    x = FMA(n, SPLAT(2.12194440e-4f), x);
    vf y = SPLAT(1.9875691500e-4f);
    y = FMA(y, x, SPLAT(1.3981999507e-3f));
    y = FMA(y, x, SPLAT(8.3334519073e-3f));
    y = FMA(y, x, SPLAT(4.1665795894e-2f));
    y = FMA(y, x, SPLAT(1.6666665459e-1f));
    y = FMA(y, x, SPLAT(5.0000001201e-1f));
    y = FMA(y, x * x, x) + 1.0f;
    return (vf)(((vi)y + exponent) & ~tiny);
}

/* The sum of d elements of x, each less `mean`; of their squares where `squared`. */
INLINE float NAME(sum)(const float *x, float mean, int squared, int64_t d) {
    vf acc = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + VL <= d; i += VL) {
        vf v = LOAD(x + i) - mean;
        if (squared) acc = FMA(v, v, acc);
        else acc += v;
    }
    for (; i < d; i++) rest += squared ? (x[i] - mean) * (x[i] - mean) : x[i] - mean;
    return NAME(hsum)(acc) + rest;
}

static void NAME(norm)(const float *x, int64_t ldx, const float *weight, const float *bias, int64_t centred, float eps,
                       int64_t n, int64_t d, float *y, int64_t ldy) {
    for (int64_t r = 0; r < n; r++) {
        const float *in = x + r * ldx;
        float *out = y + r * ldy, mean = centred ? NAME(sum)(in, 0, 0, d) / (float)d : 0;
        float factor = 1.0f / sqrtf(NAME(sum)(in, mean, 1, d) / (float)d + eps);
        for (int64_t i = 0; i < d; i++) out[i] = (in[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
    }
}

static void NAME(rope)(float *x, int64_t ldx, int64_t t, int64_t heads, int64_t dim, int64_t rope_dim, const float *cos,
                       const float *sin) {
    int64_t half = rope_dim / 2;
    for (int64_t r = 0; r < t; r++)
        for (int64_t h = 0; h < heads; h++) {
            float *a = x + r * ldx + h * dim, *b = a + half;
            const float *c = cos + r * half, *s = sin + r * half;
            for (int64_t i = 0; i < half; i++) {
                float u = a[i], v = b[i];
                a[i] = u * c[i] - v * s[i];
                b[i] = v * c[i] + u * s[i];
            }
        }
}

typedef struct {
    const float *x;
    int64_t f, act, gated;
    float *out;
} NAME(act_args);

INLINE vf NAME(least)(vf x, float most) {
    vi larger = x > most;
    return (vf)(((vi)x & ~larger) | ((vi)SPLAT(most) & larger));
}

INLINE vf NAME(activation)(vf x, int64_t act) {
    if (act == RELU2) {
        vf positive = (vf)((vi)x & (x > 0.0f));
        return positive * positive;
    }
    if (act == CLAMPED) x = NAME(least)(x, CLAMP);
    vf z = x;
    if (act == GELU) z = (x + x * x * x * 0.044715f) * 1.5957691216057308f; /* the tanh form is x * sigmoid(2z) */
    if (act == CLAMPED) z = x * 1.702f;
    return x / (NAME(exp)(-z) + 1.0f);
}

/* What an activated gate multiplies. */
INLINE vf NAME(gated)(vf u, int64_t act) {
    if (act != CLAMPED) return u;
    return -NAME(least)(-NAME(least)(u, CLAMP), CLAMP) + 1.0f;
}

static void NAME(act_task)(void *arg, int64_t row, int thread) {
    const NAME(act_args) *a = arg;
    const float *g = a->x + row * (a->gated ? 2 : 1) * a->f, *u = g + a->f;
    float *out = a->out + row * a->f;
    int64_t i = 0;
    (void)thread;
    for (; i + VL <= a->f; i += VL) {
        vf y = NAME(activation)(LOAD(g + i), a->act);
        if (a->gated) y *= NAME(gated)(LOAD(u + i), a->act);
        STORE(out + i, y);
    }
    if (i < a->f) {
        float gt[VL] = {0}, ut[VL] = {0};
        memcpy(gt, g + i, (a->f - i) * sizeof(float));
        if (a->gated) memcpy(ut, u + i, (a->f - i) * sizeof(float));
        vf y = NAME(activation)(LOAD(gt), a->act);
        if (a->gated) y *= NAME(gated)(LOAD(ut), a->act);
        memcpy(out + i, &y, (a->f - i) * sizeof(float));
    }
}

static void NAME(activate)(const float *x, int64_t t, int64_t f, int64_t act, int64_t gated, float *out) {
    NAME(act_args) a = {x, f, act, gated, out};
    parallel(t, NAME(act_task), &a);
}

#include "cpu_experts.h"

/* ---- the paged cache ------------------------------------------------------------------------------------------ */

/* Walsh-Hadamard transform of one block, in place, scaled to keep lengths. */
INLINE void NAME(hadamard)(float *x, int64_t size) {
    for (int64_t half = 1; half < size; half *= 2)
        for (int64_t i = 0; i < size; i += 2 * half)
            for (int64_t j = i; j < i + half; j++) {
                float a = x[j], b = x[j + half];
                x[j] = a + b, x[j + half] = a - b;
            }
    float scale = 1.0f / sqrtf((float)size);
    for (int64_t j = 0; j < size; j++) x[j] *= scale;
}

static void NAME(rotate)(float *x, int64_t ldx, int64_t t, int64_t heads, int64_t dim) {
    int64_t size = dim & -dim;
    for (int64_t r = 0; r < t; r++)
        for (int64_t i = 0; i < heads * dim; i += size) NAME(hadamard)(x + r * ldx + i, size);
}

/* The mean of a head's keys as they stand around a slot (a multiple of CENTRE_ROWS) of a closed page: RoPE, then rotation. */
static void NAME(centre_at)(const kv_paged *kv, int64_t head, int64_t place, int64_t slot, float *out) {
    int64_t half = kv->rope_half, at = (place * kv->page_size + slot) / CENTRE_ROWS;
    memcpy(out, kv->centre + head * kv->dim_k, kv->dim_k * sizeof(float));
    if (half) NAME(rope)(out, 0, 1, 1, kv->dim_k, 2 * half, kv->cos + at * half, kv->sin + at * half);
    NAME(rotate)(out, 0, 1, 1, kv->dim_k);
}

/* n elements in 16 or 32 bits. */
static void NAME(encode)(const float *x, int64_t n, const kv_codec *codec, uint8_t *out) {
    int is_half = codec->mantissa == 10;
    if (codec->bits == 32) {
        memcpy(out, x, n * 4);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits;
        float f = x[i] > 65504.0f ? 65504.0f : x[i] < -65504.0f ? -65504.0f : x[i]; /* no infinities in f16; NaN stays */
#if defined(__F16C__)
        bits = is_half ? _cvtss_sh(f, 0) : float_to_bf16(x[i]);
#else
        bits = is_half ? soft_float_to_half(f) : float_to_bf16(x[i]);
#endif
        memcpy(out + 2 * i, &bits, 2);
    }
}

/* The head's record in a page of that class; `page`: counted from that of position `into_first` on. */
INLINE uint8_t *NAME(written)(const kv_class *of, int64_t page, int64_t head) {
    return (uint8_t *)(intptr_t)of->into[page] + of->offset + head * of->record.bytes;
}

/* New rows go into the open pages where there are any, else straight into the closed ones. */
static void NAME(store_part)(const float *k, int64_t ldk, const float *v, int64_t ldv, int64_t t, int64_t start,
                             const kv_paged *kv) {
    const kv_class *of = kv->sealed ? &kv->open : &kv->closed;
    const kv_record *rec = &of->record;
    for (int64_t r = 0; r < t; r++) {
        int64_t row = start + r - kv->into_first, page = row / kv->page_size, slot = row % kv->page_size;
        for (int64_t h = 0; h < kv->kv_heads; h++) {
            uint8_t *record = NAME(written)(of, page, h);
            NAME(encode)(k + r * ldk + h * kv->dim_k, kv->dim_k, &rec->codec_k, record + slot * rec->k_row);
            NAME(encode)(v + r * ldv + h * kv->dim_v, kv->dim_v, &rec->codec_v, record + rec->v_offset + slot * rec->v_row);
        }
    }
}

static void NAME(store)(const float *k, int64_t ldk, const float *v, int64_t ldv, const kv_part *parts, int64_t n_parts) {
    for (const kv_part *p = parts; p < parts + n_parts; p++)
        NAME(store_part)(k + p->row * ldk, ldk, v + p->row * ldv, ldv, p->rows, p->start, p->kv);
}

/* ---- sealing: a full 16-bit page becomes codes; grid.py and float8.py are the specification ------------------------ */

INLINE float NAME(round_half)(float x) { /* to float16 and back */
#if defined(__F16C__)
    return _cvtsh_ss(_cvtss_sh(x, 0));
#else
    return soft_half_to_float(soft_float_to_half(x));
#endif
}

/* The scale of a row: the largest element just held, times each of `tries` factors 1, 1 - 0.03, ...; least error. */
INLINE float NAME(grid_scale)(const float *x, int64_t n, float centre, float lowest, float highest, int tries) {
    float largest = 0, best = 0, best_error = INFINITY;
    for (int64_t i = 0; i < n; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    for (int t = 0; t < tries; t++) {
        float scale = largest * ((1.0f - 0.03f * (float)t) / (highest - centre)), error = 0;
        scale = scale < 6e-8f ? 6e-8f : scale > 65504.0f ? 65504.0f : scale;
        scale = NAME(round_half)(scale);
        for (int64_t i = 0; i < n; i++) {
            float u = rintf(x[i] / scale + centre);
            u = u < lowest ? lowest : u > highest ? highest : u;
            float e = (u - centre) * scale - x[i];
            error += e * e;
        }
        if (error < best_error) best_error = error, best = scale;
    }
    return best;
}

/* An 8-bit float with that many bits of mantissa: round to nearest even, clamped to +-largest. */
INLINE uint8_t NAME(float8)(float x, int mantissa, float largest) {
    int bias = (1 << (6 - mantissa)) - 1, cut = 23 - mantissa;
    uint32_t sign = f32_bits(x) >> 24 & 0x80;
    float a = fabsf(x) > largest ? largest : fabsf(x);
    uint32_t u = f32_bits(a);
    if (u < (uint32_t)(128 - bias) << 23) /* subnormal: steps of 2^(1 - bias - mantissa) */
        return (uint8_t)(sign | (uint32_t)rintf(a * bits_f32((uint32_t)(126 + bias + mantissa) << 23)));
    u += (1u << (cut - 1)) - 1 + (u >> cut & 1);
    return (uint8_t)(sign | ((u >> cut) - ((uint32_t)(127 - bias) << mantissa)));
}

INLINE float NAME(middle)(const kv_codec *codec) { /* of the grid of codes */
    return (float)(codec->lowest + (INT64_C(1) << codec->bits) - 1) / 2;
}

/* Fields in a plane of codes of a row of n elements: a quarter of the elements, padding included. */
INLINE int64_t NAME(fields)(const kv_codec *codec, int64_t n) {
    return (n + codec->packing - 1) / codec->packing * codec->packing / 4;
}

/* One row of n elements; returns its scale (8-bit floats: `fixed`, which the row is divided by). */
static float NAME(encode_row)(const float *x, int64_t n, const kv_codec *codec, float fixed, uint8_t *out) {
    if (codec->bits >= 16) {
        NAME(encode)(x, n, codec, out);
        return 1.0f;
    }
    if (codec->mantissa) { /* a loop each, which is compiled for its mantissa */
        float largest = (float)codec->largest;
        if (codec->mantissa == 3)
            for (int64_t i = 0; i < n; i++) out[i] = NAME(float8)(x[i] / fixed, 3, largest);
        else
            for (int64_t i = 0; i < n; i++) out[i] = NAME(float8)(x[i] / fixed, 2, largest);
        return fixed;
    }
    int bits = (int)codec->bits;
    float highest = (float)((1 << bits) - 1), centre = NAME(middle)(codec), lowest = (float)codec->lowest;
    float scale = NAME(grid_scale)(x, n, centre, lowest, highest, (int)codec->tries);
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++) {
            float f = rintf(x[i] / scale + centre);
            out[i] = (uint8_t)(f < lowest ? lowest : f > highest ? highest : f);
        }
        return scale;
    }
    int64_t quarter = NAME(fields)(codec, n);
    uint8_t *above = out + 2 * quarter; /* the plane of what is above four bits */
    memset(out, 0, quarter * bits / 2);
    for (int64_t i = 0, j = 0, part = 0; i < n; i++, j++) { /* field j of each plane; see grid.py */
        if (j == quarter) j = 0, part++;
        float f = rintf(x[i] / scale + centre);
        uint32_t u = (uint32_t)(f < lowest ? lowest : f > highest ? highest : f);
        out[2 * j + part / 2] |= (uint8_t)((u & 15) << (4 * (part % 2)));
        if (bits == 6) above[j] |= (uint8_t)((u >> 4) << (2 * part));
        if (bits == 5) above[j < quarter / 2 ? j : j - quarter / 2] |= (uint8_t)((u >> 4) << (j < quarter / 2 ? part : part + 4));
    }
    return scale;
}

INLINE void NAME(put_half)(float x, uint8_t *out) {
#if defined(__F16C__)
    uint16_t bits = _cvtss_sh(x, 0);
#else
    uint16_t bits = soft_float_to_half(x);
#endif
    memcpy(out, &bits, 2);
}

typedef struct {
    const kv_paged *kv;
    int64_t first, end;
} NAME(seal_args);

static rows_fn NAME(rows_of)(const kv_codec *);

static void NAME(seal_task)(void *arg, int64_t task, int thread) {
    const NAME(seal_args) *a = arg;
    const kv_paged *kv = a->kv;
    const kv_record *from = &kv->open.record, *to = &kv->closed.record;
    int64_t size = kv->page_size, head = task % kv->kv_heads, page = a->first / size + task / kv->kv_heads;
    int64_t lo = a->first > page * size ? a->first - page * size : 0, hi = a->end < (page + 1) * size ? a->end - page * size : size;
    page -= kv->into_first / size;
    const uint8_t *in = NAME(written)(&kv->open, page, head);
    uint8_t *out = NAME(written)(&kv->closed, page, head);
    float *x = scratch(thread, (size_t)(2 * kv->dim_k + kv->dim_v)), *mean = x + kv->dim_k + kv->dim_v;
    rows_fn read_k = NAME(rows_of)(&from->codec_k), read_v = NAME(rows_of)(&from->codec_v);
    for (int64_t j = lo; j < hi; j++) {
        read_k(in + j * from->k_row, 0, 1, &from->codec_k, NULL, 1.0f, x, 0, kv->dim_k);
        if (kv->centre && (j == lo || j % CENTRE_ROWS == 0)) NAME(centre_at)(kv, head, kv->into_place + page, j / CENTRE_ROWS * CENTRE_ROWS, mean);
        for (int64_t i = 0; kv->centre && i < kv->dim_k; i++) x[i] -= mean[i];
        float scale = NAME(encode_row)(x, kv->dim_k, &to->codec_k, kv->static_k ? kv->static_k[head] : 1.0f, out + j * to->k_row);
        if (to->k_scales) NAME(put_half)(scale, out + to->k_scales + 2 * j);
        read_v(in + from->v_offset + j * from->v_row, 0, 1, &from->codec_v, NULL, 1.0f, x, 0, kv->dim_v);
        scale = NAME(encode_row)(x, kv->dim_v, &to->codec_v, kv->static_v ? kv->static_v[head] : 1.0f,
                                 out + to->v_offset + j * to->v_row);
        if (to->v_scales) NAME(put_half)(scale, out + to->v_scales + 2 * j);
    }
}

static void NAME(seal)(const kv_paged *kv, int64_t first, int64_t end) {
    NAME(seal_args) a = {kv, first, end};
    parallel(((end - 1) / kv->page_size - first / kv->page_size + 1) * kv->kv_heads, NAME(seal_task), &a);
}

/* VL 16-bit numbers as 32-bit integers. */
INLINE vi NAME(u16)(const uint8_t *p) {
#if VL == 16 && defined(__AVX512F__)
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    vi v;
    for (int i = 0; i < VL; i++) v[i] = read16(p + 2 * i);
    return v;
#endif
}

/* VL bytes as the high bytes of halves, shifted right by `shift` below the sign: e5m2 (0) is a half, e4m3 (1) is 2^-8 of one. */
INLINE vf NAME(load_fp8)(const uint8_t *p, int shift) {
    uint16_t h[VL];
    for (int i = 0; i < VL; i++) h[i] = (uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << (8 - shift));
    return NAME(load_f16)((const uint8_t *)h);
}

/* Element i of a packed row as its code. */
INLINE float NAME(code_at)(const uint8_t *b, int bits, int64_t quarter, int64_t i) {
    if (bits == 8) return (float)b[i];
    int64_t j = i % quarter, part = i / quarter, half = quarter / 2;
    int code = read16(b + 2 * j) >> (4 * part) & 15;
    if (bits == 6) code |= (b[2 * quarter + j] >> (2 * part) & 3) << 4;
    if (bits == 5) code |= (b[2 * quarter + j % half] >> (part + j / half * 4) & 1) << 4;
    return (float)code;
}

/* Fields [at, at + VL) of a plane of single bits, two in a byte: the first `half` of them low, the others above. What is
 * above the four bits of a field is not cleared. */
INLINE vi NAME(nibble_fields)(const uint8_t *b, int64_t half, int64_t at) {
    if (at + VL <= half) return NAME(u8)(b + at);
    if (at >= half) return NAME(u8)(b + at - half) >> 4;
#if VL == 16
    if (half == 8) { /* both halves at once, from registers */
        uint64_t low;
        memcpy(&low, b, 8);
        uint64_t both __attribute__((vector_size(16))) = {low, low >> 4};
        return NAME(u8)((const uint8_t *)&both);
    }
#endif
    uint8_t bytes[VL];
    for (int i = 0; i < VL; i++) bytes[i] = at + i < half ? b[at + i] : b[at + i - half] >> 4;
    return NAME(u8)(bytes);
}

INLINE void NAME(decode_grid)(const uint8_t *b, int bits, int64_t quarter, float centre, float scale, float *out, int64_t n) {
    int64_t done = 0; /* whole vectors of every quarter, then what is left one by one */
    if (bits == 8) {
        for (; done + VL <= n; done += VL) STORE(out + done, (FLOATS(NAME(u8)(b + done)) - centre) * scale);
        for (; done < n; done++) out[done] = (NAME(code_at)(b, bits, quarter, done) - centre) * scale;
        return;
    }
    if (4 * quarter == n)
        for (; done + VL <= quarter; done += VL) {
            vi word = NAME(u16)(b + 2 * done), above = word;
            if (bits == 6) above = NAME(u8)(b + 2 * quarter + done);
            if (bits == 5) above = NAME(nibble_fields)(b + 2 * quarter, quarter / 2, done);
            for (int p = 0; p < 4; p++) {
                vi code = word >> (4 * p) & 15;
                if (bits == 6) code |= (above >> (2 * p) & 3) << 4;
                if (bits == 5) code |= (above >> p & 1) << 4;
                STORE(out + p * quarter + done, (FLOATS(code) - centre) * scale);
            }
        }
    for (int64_t j = done; j < quarter; j++)
        for (int64_t i = j; i < n; i += quarter) out[i] = (NAME(code_at)(b, bits, quarter, i) - centre) * scale;
}

INLINE void NAME(decode_float8)(const uint8_t *b, int mantissa, float scale, float *out, int64_t n) {
    int shift = mantissa - 2;
    float factor = shift ? 256.0f * scale : scale;
    int64_t i = 0;
    for (; i + VL <= n; i += VL) STORE(out + i, NAME(load_fp8)(b + i, shift) * factor);
    for (; i < n; i++) out[i] = NAME(half)((uint16_t)((b[i] & 0x80) << 8 | (b[i] & 0x7f) << (8 - shift))) * factor;
}

/* From each cache type rows_X: rows of n elements, `pitch` bytes apart, to float32, `ld` apart. Each row has a scale in
 * `scales`, or all have `fixed` where that is NULL. */
#define CODEC_ROWS(name, decode)                                                                                      \
    static void NAME(rows_##name)(const uint8_t *b, int64_t pitch, int64_t rows, const kv_codec *codec,               \
                                  const uint8_t *scales, float fixed, float *out, int64_t ld, int64_t n) {            \
        int64_t quarter = NAME(fields)(codec, n);                                                                     \
        float centre = NAME(middle)(codec);                                                                           \
        (void)quarter, (void)centre;                                                                                  \
        for (int64_t j = 0; j < rows; j++, b += pitch, out += ld) {                                                   \
            float scale = scales ? HALF(scales + 2 * j) : fixed;                                                      \
            (void)scale;                                                                                              \
            decode;                                                                                                   \
        }                                                                                                             \
    }

CODEC_ROWS(f32, NAME(decode_f32)(b, out, n))
CODEC_ROWS(f16, NAME(decode_f16)(b, out, n))
CODEC_ROWS(bf16, NAME(decode_bf16)(b, out, n))
CODEC_ROWS(e4m3, NAME(decode_float8)(b, 3, scale, out, n))
CODEC_ROWS(e5m2, NAME(decode_float8)(b, 2, scale, out, n))
CODEC_ROWS(int8, NAME(decode_grid)(b, 8, quarter, centre, scale, out, n))
CODEC_ROWS(int6, NAME(decode_grid)(b, 6, quarter, centre, scale, out, n))
CODEC_ROWS(int5, NAME(decode_grid)(b, 5, quarter, centre, scale, out, n))
CODEC_ROWS(int4, NAME(decode_grid)(b, 4, quarter, centre, scale, out, n))

/* What decodes rows of that cache type, NULL if nothing does. */
static rows_fn NAME(rows_of)(const kv_codec *codec) {
    switch (CODEC(codec->bits, codec->mantissa)) {
    case CODEC(32, 23): return NAME(rows_f32);
    case CODEC(16, 10): return NAME(rows_f16);
    case CODEC(16, 7): return NAME(rows_bf16);
    case CODEC(8, 3): return NAME(rows_e4m3);
    case CODEC(8, 2): return NAME(rows_e5m2);
    case CODEC(8, 0): return NAME(rows_int8);
    case CODEC(6, 0): return NAME(rows_int6);
    case CODEC(5, 0): return NAME(rows_int5);
    case CODEC(4, 0): return NAME(rows_int4);
    default: return NULL;
    }
}

#define QUERY_BLOCK 16 /* queries that share one decoded tile in prefill; blocks begin at multiples, as pages do */

typedef struct {
    const float *q, *turned; /* turned: for turned entries; it may be NULL */
    int64_t ldq, ld_turned, t, heads, start, window;
    float scale, softcap;
    const float *sinks; /* a logit of each head, which takes part in the softmax and has no value; it may be NULL */
    const kv_paged *kv;
    float *out;
    int64_t dkp, dvp, n_blocks, n_spans;
    int64_t *spans; /* one query: a task for each span, which begin at these entries, [n_spans + 1] */
    float *partial; /* [kv_heads * n_spans, group, dvp + 2] */
    int64_t first_task; /* of the part, among those of all parts */
} NAME(attn_args);

/* Slots of an entry that a query at `pos` sees, sets [*lo, *hi); returns whether there are any. */
INLINE int NAME(seen)(const kv_entry *e, int64_t window, int64_t pos, int64_t *lo, int64_t *hi) {
    int64_t oldest = window && pos - window + 1 > e->first ? pos - window + 1 - e->first : 0;
    *lo = oldest > e->lo ? oldest : e->lo;
    *hi = pos + 1 - e->first < e->hi ? pos + 1 - e->first : e->hi;
    return e->since <= pos && pos < e->until && *lo < *hi;
}

/* The span that an entry belongs to; it depends on positions alone, so that sums are the same ones whatever else is there. */
INLINE int64_t NAME(span_of)(const kv_paged *kv, const kv_entry *e) { return e->first / (SPAN_PAGES * kv->page_size); }

/* Running softmax of one (query, head) row: max, sum, accumulator [dvp]. */
INLINE void NAME(merge)(float *m, float *l, float *acc, float pm, float pl, const float *pacc, int64_t dvp) {
    if (pm == -INFINITY) return;
    float top = *m > pm ? *m : pm;
    vf f[2] = {SPLAT(*m - top), SPLAT(pm - top)};
    float old = *m == -INFINITY ? 0.0f : NAME(exp)(f[0])[0], add = NAME(exp)(f[1])[0];
    for (int64_t d = 0; d < dvp; d += VL) STORE(acc + d, LOAD(acc + d) * old + LOAD(pacc + d) * add);
    *l = *l * old + pl * add;
    *m = top;
}

/* The state of rows that have seen nothing. */
INLINE void NAME(nothing)(float *state, int64_t rows, int64_t stride) {
    memset(state, 0, (size_t)rows * stride * sizeof(float));
    for (int64_t r = 0; r < rows; r++) state[r * stride + stride - 2] = -INFINITY;
}

/* Scores of one query row against the keys of a tile, then its softmax update. Keys outside [lo, hi) are unseen. */
INLINE void NAME(attend_row)(const NAME(attn_args) *a, const float *q, const float *keys, const float *values, float *scores,
                             const float *mean, int64_t lo, int64_t hi, float *m, float *l, float *acc) {
    int64_t from = lo / VL * VL;
    float top = *m, bias = 0; /* the score of the mean that the page's keys lack */
    for (int64_t j = from; j < hi; j += VL) {
        vf dot[VL] = {0};
        for (int64_t d = 0; d < a->dkp; d += VL) {
            vf x = LOAD(q + d);
            UNROLL for (int i = 0; i < VL; i++) dot[i] = FMA(x, LOAD(keys + (j + i) * a->dkp + d), dot[i]);
        }
        if (mean && (j == from || j % CENTRE_ROWS == 0)) {
            const float *c = mean + j / CENTRE_ROWS * a->dkp;
            vf sum = {0};
            for (int64_t d = 0; d < a->dkp; d += VL) sum = FMA(LOAD(q + d), LOAD(c + d), sum);
            bias = NAME(hsum)(sum);
        }
        vf s = (NAME(hsums)(dot) + bias) * a->scale;
        STORE(scores + j, s);
        for (int i = 0; a->softcap > 0 && i < VL; i++) scores[j + i] = a->softcap * tanhf(scores[j + i] / a->softcap);
        for (int64_t i = j; i < lo; i++) scores[i] = -INFINITY;
        for (int64_t i = hi; i < j + VL; i++) scores[i] = -INFINITY;
        for (int i = 0; i < VL; i++) top = scores[j + i] > top ? scores[j + i] : top;
    }
    float old = *m == -INFINITY ? 0.0f : NAME(exp)(SPLAT(*m - top))[0], sum = 0;
    vf sums = {0};
    for (int64_t j = from; j < hi; j += VL) {
        vf p = NAME(exp)(LOAD(scores + j) - top);
        STORE(scores + j, p);
        sums += p;
    }
    sum = NAME(hsum)(sums);
    for (int64_t d = 0; d < a->dvp; d += 4 * VL) { /* dvp is a multiple of 4 * VL */
        vf o[4];
        for (int i = 0; i < 4; i++) o[i] = LOAD(acc + d + i * VL) * old;
        for (int64_t j = lo; j < hi; j++) {
            vf p = SPLAT(scores[j]);
            UNROLL for (int i = 0; i < 4; i++) o[i] = FMA(p, LOAD(values + j * a->dvp + d + i * VL), o[i]);
        }
        for (int i = 0; i < 4; i++) STORE(acc + d + i * VL, o[i]);
    }
    *l = *l * old + sum;
    *m = top;
}

/* Decode slots [lo, hi) of an entry for one head: keys [page, dkp] and values [page, dvp], padding zero; what its keys lack
 * into `mean` [page / CENTRE_ROWS, dkp], or returns 0. */
INLINE int NAME(load_tile)(const NAME(attn_args) *a, const kv_entry *e, int64_t head, int64_t lo, int64_t hi, float *keys,
                           float *values, float *mean) {
    const kv_paged *kv = a->kv;
    const kv_class *of = e->open ? &kv->open : &kv->closed;
    const kv_record *rec = &of->record;
    const uint8_t *r = (const uint8_t *)(intptr_t)e->address + of->offset + head * rec->bytes;
    float sk = kv->static_k ? kv->static_k[head] : 1.0f, sv = kv->static_v ? kv->static_v[head] : 1.0f;
    const uint8_t *k = r + lo * rec->k_row, *v = r + rec->v_offset + lo * rec->v_row;
    NAME(rows_of)(&rec->codec_k)(k, rec->k_row, hi - lo, &rec->codec_k, rec->k_scales ? r + rec->k_scales + 2 * lo : NULL, sk,
                                 keys + lo * a->dkp, a->dkp, kv->dim_k);
    NAME(rows_of)(&rec->codec_v)(v, rec->v_row, hi - lo, &rec->codec_v, rec->v_scales ? r + rec->v_scales + 2 * lo : NULL, sv,
                                 values + lo * a->dvp, a->dvp, kv->dim_v);
    if (e->open || !kv->centre) return 0;
    for (int64_t j = lo / CENTRE_ROWS * CENTRE_ROWS; j < hi; j += CENTRE_ROWS)
        NAME(centre_at)(kv, head, e->place, j, mean + j / CENTRE_ROWS * a->dkp);
    return 1;
}

/* Floats of scratch a task needs besides its rows' state. */
INLINE size_t NAME(attn_scratch)(const NAME(attn_args) *a, int64_t rows) {
    int64_t padded = (a->kv->page_size + VL - 1) / VL * VL;
    int64_t queries = a->turned ? 2 * rows : rows;
    return (size_t)(padded * (a->dkp + a->dvp + 1) + (padded / CENTRE_ROWS + queries) * a->dkp + rows * (2 * a->dvp + 4));
}

/* Queries [t0, t1) of a kv head's group, each padded to dkp floats, into zeroed memory. */
INLINE void NAME(gather)(const NAME(attn_args) *a, const float *q, int64_t ldq, int64_t head, int64_t t0, int64_t rows, float *out) {
    int64_t group = a->heads / a->kv->kv_heads, dim = a->kv->dim_k;
    for (int64_t r = 0; r < rows; r++)
        memcpy(out + r * a->dkp, q + (t0 + r / group) * ldq + (head * group + r % group) * dim, dim * sizeof(float));
}

/* Queries [t0, t1) x the group of one kv head over entries [e0, e1), span by span; state is [rows][dvp + 2] = acc, max, sum. */
static void NAME(attend)(const NAME(attn_args) *a, int64_t head, int64_t t0, int64_t t1, int64_t e0, int64_t e1, float *state,
                         float *work) {
    const kv_paged *kv = a->kv;
    int64_t size = kv->page_size, padded = (size + VL - 1) / VL * VL, group = a->heads / kv->kv_heads, rows = (t1 - t0) * group;
    float *keys = work, *values = keys + padded * a->dkp, *scores = values + padded * a->dvp;
    float *mean = scores + padded, *queries = mean + padded / CENTRE_ROWS * a->dkp;
    float *turned = a->turned ? queries + rows * a->dkp : queries, *part = turned + rows * a->dkp;
    int64_t stride = a->dvp + 2, first = a->start + t0, last = a->start + t1 - 1;
    memset(work, 0, (size_t)padded * (a->dkp + a->dvp) * sizeof(float));
    memset(mean, 0, (size_t)(part - mean) * sizeof(float)); /* and the queries, which follow */
    NAME(gather)(a, a->q, a->ldq, head, t0, rows, queries);
    if (a->turned) NAME(gather)(a, a->turned, a->ld_turned, head, t0, rows, turned);
    NAME(nothing)(state, rows, stride);
    for (const kv_entry *e = kv->entries + e0, *end = kv->entries + e1; e < end;) {
        int64_t span = NAME(span_of)(kv, e), lo, hi, from, to;
        NAME(nothing)(part, rows, stride);
        for (; e < end && NAME(span_of)(kv, e) == span; e++) {
            if (last < e->since || first >= e->until) continue;
            NAME(seen)(e, a->window, first, &lo, &to); /* the oldest row that one of these queries sees */
            NAME(seen)(e, a->window, last, &from, &hi); /* and the newest */
            if (lo >= hi) continue;
            int centred = NAME(load_tile)(a, e, head, lo, hi, keys, values, mean);
            for (int64_t r = 0; r < rows; r++) {
                const float *query = (e->turned ? turned : queries) + r * a->dkp;
                float *p = part + r * stride;
                if (NAME(seen)(e, a->window, first + r / group, &from, &to))
                    NAME(attend_row)(a, query, keys, values, scores, centred ? mean : NULL, from, to, p + a->dvp,
                                     p + a->dvp + 1, p);
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            float *t = state + r * stride, *p = part + r * stride;
            NAME(merge)(t + a->dvp, t + a->dvp + 1, t, p[a->dvp], p[a->dvp + 1], p, a->dvp);
        }
    }
}

INLINE void NAME(write_out)(const NAME(attn_args) *a, const float *state, int64_t head, int64_t t0, int64_t t1) {
    int64_t group = a->heads / a->kv->kv_heads, dim = a->kv->dim_v;
    for (int64_t r = 0; r < (t1 - t0) * group; r++) {
        const float *s = state + r * (a->dvp + 2);
        int64_t h = head * group + r % group;
        float *out = a->out + ((t0 + r / group) * a->heads + h) * dim, total = s[a->dvp + 1], scale = 1.0f;
        if (a->sinks) {
            float top = s[a->dvp] > a->sinks[h] ? s[a->dvp] : a->sinks[h];
            scale = NAME(exp)(SPLAT(s[a->dvp] - top))[0];
            total = total * scale + NAME(exp)(SPLAT(a->sinks[h] - top))[0];
        }
        for (int64_t d = 0; d < dim; d++) out[d] = s[d] * scale / total;
    }
}

static void NAME(attn_block_task)(void *arg, int64_t task, int thread) {
    const NAME(attn_args) *a = arg;
    int64_t group = a->heads / a->kv->kv_heads, head = task % a->kv->kv_heads, block = task / a->kv->kv_heads;
    int64_t t0 = block * QUERY_BLOCK - a->start % QUERY_BLOCK, t1 = t0 + QUERY_BLOCK < a->t ? t0 + QUERY_BLOCK : a->t;
    if (t0 < 0) t0 = 0;
    int64_t rows = (t1 - t0) * group;
    float *state = scratch(thread, NAME(attn_scratch)(a, rows) + rows * (a->dvp + 2));
    NAME(attend)(a, head, t0, t1, 0, a->kv->n_entries, state, state + rows * (a->dvp + 2));
    NAME(write_out)(a, state, head, t0, t1);
}

static void NAME(attn_span_task)(void *arg, int64_t task, int thread) {
    const NAME(attn_args) *a = arg;
    int64_t group = a->heads / a->kv->kv_heads, head = task / a->n_spans, span = task % a->n_spans;
    NAME(attend)(a, head, 0, 1, a->spans[span], a->spans[span + 1], a->partial + task * group * (a->dvp + 2),
                 scratch(thread, NAME(attn_scratch)(a, group)));
}

/* One query over several spans, a task a span: they are merged in the order in which prefill meets them. */
static void NAME(merge_spans)(NAME(attn_args) *a) {
    int64_t group = a->heads / a->kv->kv_heads, heads = a->kv->kv_heads, stride = a->dvp + 2;
    float *state = a->partial + heads * a->n_spans * group * stride;
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t r = 0; r < group; r++) {
            float *t = state + r * stride;
            NAME(nothing)(t, 1, stride);
            for (int64_t s = 0; s < a->n_spans; s++) {
                const float *p = a->partial + ((head * a->n_spans + s) * group + r) * stride;
                NAME(merge)(t + a->dvp, t + a->dvp + 1, t, p[a->dvp], p[a->dvp + 1], p, a->dvp);
            }
        }
        NAME(write_out)(a, state, head, 0, 1);
    }
}

typedef struct {
    const NAME(attn_args) *parts;
    int64_t n_parts;
} NAME(attn_parts);

static void NAME(attn_task)(void *arg, int64_t task, int thread) {
    const NAME(attn_parts) *all = arg;
    const NAME(attn_args) *a = all->parts + all->n_parts - 1;
    while (task < a->first_task) a--;
    (a->partial ? NAME(attn_span_task) : NAME(attn_block_task))((void *)a, task - a->first_task, thread);
}

/* Where the spans begin that a part's only query sees; where there are several, each is a task of its own. */
static void NAME(share_spans)(NAME(attn_args) *a) {
    const kv_paged *kv = a->kv;
    int64_t latest = -1, lo, hi;
    a->spans = malloc((kv->n_entries + 1) * sizeof(int64_t));
    if (!a->spans) abort();
    for (int64_t i = 0; i < kv->n_entries; i++) {
        int64_t span = NAME(span_of)(kv, kv->entries + i);
        if (span != latest && NAME(seen)(kv->entries + i, a->window, a->start, &lo, &hi)) a->spans[a->n_spans++] = i, latest = span;
    }
    a->spans[a->n_spans] = kv->n_entries;
    if (a->n_spans < 2) return;
    a->partial = malloc((size_t)(kv->kv_heads * a->n_spans + 1) * (a->heads / kv->kv_heads) * (a->dvp + 2) * sizeof(float));
    if (!a->partial) abort();
}

static void NAME(attention)(const float *q, int64_t ldq, const float *turned, int64_t ld_turned, int64_t heads, int64_t window,
                            float scale, float softcap, const float *sinks, const kv_part *parts, int64_t n_parts, float *out) {
    NAME(attn_args) one, *all = n_parts == 1 ? &one : malloc(n_parts * sizeof(NAME(attn_args)));
    int64_t tasks = 0;
    if (!all) abort();
    for (int64_t i = 0; i < n_parts; i++) {
        const kv_part *p = parts + i;
        const kv_paged *kv = p->kv;
        NAME(attn_args) a = {q + p->row * ldq, turned ? turned + p->row * ld_turned : NULL, ldq, ld_turned, p->rows, heads,
                             p->start, window, scale, softcap, sinks, kv, out + p->row * heads * kv->dim_v};
        a.dkp = (kv->dim_k + VL - 1) / VL * VL;
        a.dvp = (kv->dim_v + 4 * VL - 1) / (4 * VL) * (4 * VL);
        a.n_blocks = (p->start % QUERY_BLOCK + p->rows + QUERY_BLOCK - 1) / QUERY_BLOCK;
        a.first_task = tasks;
        if (p->rows == 1) NAME(share_spans)(&a);
        tasks += kv->kv_heads * (a.partial ? a.n_spans : a.n_blocks);
        all[i] = a;
    }
    NAME(attn_parts) work = {all, n_parts};
    parallel(tasks, NAME(attn_task), &work);
    for (int64_t i = 0; i < n_parts; i++) {
        if (all[i].partial) NAME(merge_spans)(all + i);
        free(all[i].partial), free(all[i].spans);
    }
    if (all != &one) free(all);
}

static const kernels NAME(kernels) = {
#if VL == 16
    "avx512",
#elif VL == 8
    "avx2",
#else
    "base",
#endif
    NAME(matmul), NAME(matmul_experts), NAME(route), NAME(mix), NAME(rows), NAME(norm), NAME(rope), NAME(activate),
    NAME(rotate), NAME(store), NAME(seal), NAME(rows_of),
    NAME(attention),
};

#undef vf
#undef vi
#undef INLINE
#undef UNROLL
#undef LOAD
#undef STORE
#undef SPLAT
#undef FLOATS
#undef FMA
#undef HALF
#undef VECTORS
#undef NIBBLES
#undef EACH_SIDE
#undef PANEL
#undef WEIGHT_TILE
#undef FEW
#undef FEW_TILE
#undef IN_REGISTER
#undef QUERY_BLOCK
