/* Kernels for one instruction set. Included by cpu.c with NAME(x), VL (floats per vector) and ROWS_TILE (rows of x
 * per register tile) defined. Vectors are GCC/Clang vector extensions, so one text serves every target. */

#define vf NAME(vf)
#define vi NAME(vi)
typedef float vf __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VL), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define REGISTERS (VL == 16 || ROWS_TILE == 4 ? 32 : 16) /* of vectors */
#define LOAD(p) (*(const vf *)(p))
#define STORE(p, v) (*(vf *)(p) = (v))
#define SPLAT(x) ((x) - (vf){0}) /* x - 0 is x, so the compiler keeps only the broadcast */
#define FLOATS(ints) __builtin_convertvector(ints, vf)

INLINE vf NAME(fma)(vf a, vf b, vf c) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif NEON
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
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
#elif NEON
    float32x2_t halves = vadd_f32(vget_low_f32((float32x4_t)v), vget_high_f32((float32x4_t)v));
    return vget_lane_f32(vpadd_f32(halves, halves), 0);
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
#elif VL == 8 && defined(__AVX2__)
    __m256 t[4], u[2];
    for (int i = 0; i < 4; i++) t[i] = _mm256_hadd_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
    for (int i = 0; i < 2; i++) u[i] = _mm256_hadd_ps(t[2 * i], t[2 * i + 1]);
    return (vf)_mm256_add_ps(_mm256_permute2f128_ps(u[0], u[1], 0x20), _mm256_permute2f128_ps(u[0], u[1], 0x31));
#elif NEON
    return (vf)vpaddq_f32(vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]), vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3]));
#else
    vf sums;
    for (int i = 0; i < VL; i++) sums[i] = NAME(hsum)(v[i]);
    return sums;
#endif
}

INLINE float NAME(half)(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif NEON
    __fp16 f;
    memcpy(&f, &h, 2);
    return (float)f;
#else
    return soft_half_to_float(h);
#endif
}
#define HALF(p) NAME(half)(read16(p))

INLINE uint16_t NAME(to_half)(float f) {
#if defined(__F16C__)
    return _cvtss_sh(f, 0);
#elif NEON
    __fp16 h = (__fp16)f;
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
#else
    return soft_float_to_half(f);
#endif
}

#include "cpu_blocks.h"

/* ---- matrix product: out = x . W^T -------------------------------------------------------------------------- */

#define PANEL 16      /* weight rows decoded whole when x has several rows */
#define WEIGHT_TILE 4 /* weight rows per register tile */
#define FEW (REGISTERS == 32 ? 8 : 4) /* rows of x whose sums have room in registers, with FEW_TILE weight rows */
#define FEW_TILE 2
#if VL >= 8 /* loaded once for several uses, not as an operand of each */
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#elif NEON
#define IN_REGISTER(x) __asm__("" : "+w"(x))
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

static void NAME(add)(float *x, int64_t ldx, const float *y, int64_t ldy, float scale, int64_t n, int64_t d) {
    for (int64_t r = 0; r < n; r++, x += ldx, y += ldy)
        for (int64_t i = 0; i < d; i++) x[i] += scale * y[i];
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

#include "cpu_codecs.h"
#include "cpu_cache.h"
#include "cpu_attention.h"
#include "cpu_states.h"

static const kernels NAME(kernels) = {
    NAME(matmul), NAME(matmul_experts), NAME(route), NAME(mix), NAME(rows), NAME(norm), NAME(add), NAME(rope), NAME(activate),
    NAME(rotate), NAME(store), NAME(seal), NAME(has_codec),
    NAME(attention), NAME(short_conv), NAME(delta_net), NAME(mamba),
};

#undef vf
#undef vi
#undef INLINE
#undef UNROLL
#undef REGISTERS
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
#undef QUERY_ROWS
#undef PLAIN_CODES
#undef LOAD_F32
#undef LOAD_INT8
#undef LOAD_E4M3
#undef LOAD_E5M2
#undef READER
#undef READERS
#undef ROWS
#undef FP8_FACTOR
