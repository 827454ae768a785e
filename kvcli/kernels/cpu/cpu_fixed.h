/* Products of interleaved weights with rows in fixed point, for one instruction set. Included by cpu.c with NAME(x), LANES
 * (weight rows per vector: 16, 8, or 4 of NEON) and BYTES (whether bytes are multiplied, four at a time, or numbers of 16 bits)
 * defined.
 *
 * A row of x is cut into blocks of 32, which are whole multiples, of 15 bits and a sign, of a scale of their own. Sums of
 * codes times multiples are exact integers, so their order does not matter, and neither does the instruction set; what is
 * float32 is one fixed sequence for each output, block by block (for Q6_K, whose scales are of 16 columns, half by half):
 *     acc = fma(sum of codes * multiples, weight scale * row scale, acc)
 *     acc = fma(weight minimum, row scale * sum of multiples, acc)      of formats with a minimum */

#define qv NAME(qv)
#define fv NAME(fv)
#define iv NAME(iv)
#if LANES == 4 /* an instruction shifts bytes */
typedef uint8_t qv __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
#define EACH_BYTE(x) (uint8_t)(x)
#define HIGH_HALVES(x) ((x) >> 4)
#else
typedef uint16_t qv __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
#define EACH_BYTE(x) (uint16_t)((x) * 0x101)
#define HIGH_HALVES(x) ((x) >> 4 & 0x0f0f)
#endif
typedef float fv __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int32_t iv __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define SIDES (GROUP / LANES)
#if BYTES && LANES > 4
#define TILE (LANES == 16 ? 8 : 4) /* rows of x whose sums have room in registers */
#define AT_ONCE 1                  /* sides that a tile has */
#define MOST_ROWS TILE             /* rows of x for which codes are unpacked once */
#else
#define TILE 4
#define AT_ONCE SIDES
#define MOST_ROWS 32
#endif

INLINE fv NAME(splat)(float x) { return x - (fv){0}; }

#if LANES == 4
#include "cpu_neon.h"
#else
#define IN_ORDER
INLINE fv NAME(madd)(fv a, fv b, fv c) {
#if LANES == 16
    return (fv)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (fv)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

INLINE fv NAME(halves)(const uint8_t *p) {
#if LANES == 16
    return (fv)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    return (fv)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#endif
}

INLINE fv NAME(small)(const uint8_t *p, int is_signed) {
#if LANES == 16
    __m128i b = _mm_loadu_si128((const __m128i *)p);
    return (fv)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(b) : _mm512_cvtepu8_epi32(b));
#else
    __m128i b = _mm_loadl_epi64((const __m128i *)p);
    return (fv)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(b) : _mm256_cvtepu8_epi32(b));
#endif
}
#endif

/* ---- weights ----------------------------------------------------------------------------------------------------------- */

typedef struct { /* what stands at the head of an interleaved block, of the rows of a tile's sides */
    fv d[AT_ONCE], m[AT_ONCE];
    uint8_t scales[8 * GROUP], mins[8 * GROUP]; /* of formats with 12 bytes of them */
    const uint8_t *bytes;                       /* of formats with a byte for each scale */
} NAME(fixed_head);

INLINE void NAME(read_head)(const uint8_t *b, int side, int halves, int bytes, NAME(fixed_head) *h) {
    for (int s = 0; s < AT_ONCE; s++) {
        h->d[s] = NAME(halves)(b + 2 * LANES * (side + s));
        if (halves == 2) h->m[s] = NAME(halves)(b + 2 * GROUP + 2 * LANES * (side + s));
    }
    h->bytes = b + 2 * GROUP * halves + LANES * side;
    for (int i = 0; i < SIDES && bytes == 12; i++) {
        const qv *s = (const qv *)(b + 2 * GROUP * halves) + i;
        qv *scales = (qv *)h->scales + i, *mins = (qv *)h->mins + i;
        *scales = s[0] & EACH_BYTE(0x3f), *mins = s[SIDES] & EACH_BYTE(0x3f);
        scales[SIDES] = (s[2 * SIDES] & EACH_BYTE(0x0f)) | (s[0] >> 2 & EACH_BYTE(0x30));
        mins[SIDES] = HIGH_HALVES(s[2 * SIDES]) | (s[SIDES] >> 2 & EACH_BYTE(0x30));
    }
}

/* Scale and minimum (0 = none) of columns 32 * part on of a tile's s-th side, whose first one is `side`; for scales of 16 columns,
 * of those from there or from the middle on. */
INLINE void NAME(fixed_scales)(const NAME(fixed_head) *h, int side, int s, int part, int half, int halves, int bytes, fv *scale, fv *min) {
    if (bytes == 12) {
        *scale = h->d[s] * NAME(small)(h->scales + GROUP * part + LANES * (side + s), 0);
        *min = -(h->m[s] * NAME(small)(h->mins + GROUP * part + LANES * (side + s), 0));
        return;
    }
    *scale = h->d[s];
    if (bytes) *scale = h->d[s] * NAME(small)(h->bytes + GROUP * (2 * part + half) + LANES * s, 1);
    if (halves == 2) *min = h->m[s];
    else *min = (fv){0};
}

INLINE void NAME(unpack)(const uint8_t *p, int bits, qv *u) {
    if (bits == 8) {
        for (int j = 0; j < 8; j++) u[j] = *(const qv *)(p + 64 * j);
        return;
    }
    for (int j = 0; j < 4; j++) {
        qv both = *(const qv *)(p + 64 * j);
        u[j] = both & EACH_BYTE(0x0f), u[j + 4] = HIGH_HALVES(both);
    }
    if (bits == 5) {
        qv high = *(const qv *)(p + 256);
        UNROLL for (int j = 0; j < 8; j++) u[j] |= (j <= 4 ? high << (4 - j) : high >> (j - 4)) & EACH_BYTE(0x10);
    }
    if (bits == 6)
        UNROLL for (int j = 0; j < 8; j++) {
            qv high = *(const qv *)(p + 256 + 64 * (j / 4));
            u[j] |= (j % 4 < 3 ? high << (4 - 2 * (j % 4)) : high >> 2) & EACH_BYTE(0x30);
        }
}

/* ---- products ---------------------------------------------------------------------------------------------------------- */

#if LANES > 4
INLINE iv NAME(four)(const void *p) { /* four bytes, in every lane */
    int32_t bits;
    memcpy(&bits, p, 4);
    return bits - (iv){0};
}

#if BYTES
INLINE iv NAME(dot4)(iv sum, qv codes, iv x) {
#if LANES == 16
    return (iv)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#else
    return (iv)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#endif
}
#define CODES 8

/* Minus the sum of the multiples of the j-th to the last of eight times four columns: all, the first or the last half. */
INLINE iv NAME(less)(const kv_fixed *x, int j, int end) {
    int32_t first = x->less_first, all = x->less;
    return (end == 4 ? first : j ? all - first : all) - (iv){0};
}

/* sums[r] = codes, each less `offset`, times the multiples of row r, over the j-th to the last of eight times four columns.
 * Sums of different rows are in flight at once; of few rows, of both bytes. */
INLINE void NAME(sums)(qv (*u)[CODES], const kv_fixed *x, int j, int end, int offset, iv (*sums)[AT_ONCE], int rows) {
    iv low[4] = {0}, starts[TILE];
    const int apart = rows <= 4;
    UNROLL for (int r = 0; r < rows; r++) {
        if (offset) starts[r] = NAME(less)(x + r, j, end);
        if (offset == 128) sums[r][0] = starts[r];
        else sums[r][0] = (iv){0};
    }
    UNROLL for (int i = j; i < end; i++)
        UNROLL for (int r = 0; r < rows; r++) {
            sums[r][0] = NAME(dot4)(sums[r][0], u[0][i], NAME(four)(x[r].high + 4 * i));
            if (apart) low[r] = NAME(dot4)(low[r], u[0][i], NAME(four)(x[r].low + 4 * i));
        }
    UNROLL for (int r = 0; r < rows; r++) {
        sums[r][0] <<= 7;
        if (offset && offset < 128) sums[r][0] += starts[r] * offset;
        if (apart) sums[r][0] += low[r];
    }
    if (!apart)
        UNROLL for (int i = j; i < end; i++)
            UNROLL for (int r = 0; r < rows; r++) sums[r][0] = NAME(dot4)(sums[r][0], u[0][i], NAME(four)(x[r].low + 4 * i));
}

INLINE void NAME(widen)(const qv *u, int offset, int tile, qv *out) {
    (void)offset, (void)tile;
    memcpy(out, u, 8 * sizeof(qv));
}
#else
INLINE iv NAME(dot2)(qv codes, iv x) { return (iv)_mm256_madd_epi16((__m256i)codes, (__m256i)x); }
#define CODES 16
/* Or the compiler would load codes for each use, and add up in a tree, for which there are too few registers. */
#define IN_REGISTER(x) __asm__("" : "+x"(x))

/* sums[r][side] = codes times the multiples of row r, over the j-th to the last of eight times four columns. */
INLINE void NAME(sums)(qv (*u)[CODES], const kv_fixed *x, int j, int end, int offset, iv (*sums)[AT_ONCE], int rows) {
    (void)offset; /* the codes are without it */
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int side = 0; side < AT_ONCE; side++) sums[r][side] = (iv){0};
    UNROLL for (int i = 2 * j; i < 2 * end; i++) {
        qv codes[AT_ONCE];
        UNROLL for (int side = 0; side < AT_ONCE; side++) {
            codes[side] = u[side][i];
            IN_REGISTER(codes[side]);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            iv two = NAME(four)(x[r].pairs + 2 * i);
            UNROLL for (int side = 0; side < AT_ONCE; side++) {
                sums[r][side] += NAME(dot2)(codes[side], two);
                IN_REGISTER(sums[r][side]);
            }
        }
    }
}

/* 16 bits with a sign: columns 0 and 2 of four, then 1 and 3. */
INLINE void NAME(widen)(const qv *u, int offset, int tile, qv *out) {
    (void)tile;
    for (int j = 0; j < 8; j++)
        out[2 * j] = (u[j] & 0x00ff) - (uint16_t)offset, out[2 * j + 1] = (u[j] >> 8) - (uint16_t)offset;
}
#endif
#endif

/* AT_ONCE sides of a group of weight rows, from `side` on, times `rows` rows of x: a whole number of tiles of `tile`, for which
 * codes are unpacked once. Blocks of the rows stand beside each other, the next ones `stride` further on. */
INLINE void NAME(fixed_tile)(const uint8_t *w, int side, const kv_fixed *x, int64_t stride, int64_t blocks, int64_t rows, fv (*out)[AT_ONCE],
                             int tile, int elements, int size, int bits, int offset, int halves, int bytes, int sixteens) {
    const kv_fixed *end = x + blocks * stride;
    fv acc[MOST_ROWS][AT_ONCE];
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < AT_ONCE; s++) acc[r][s] = (fv){0};
    for (; x < end; w += GROUP * size) {
        NAME(fixed_head) h;
        NAME(read_head)(w, side, halves, bytes, &h);
        const uint8_t *codes = w + GROUP * (2 * halves + bytes) + 4 * LANES * side;
        for (int part = 0; part < elements / 32; part++, x += stride) {
            fv scale[2][AT_ONCE], min[AT_ONCE];
            qv wide[AT_ONCE][CODES];
            for (int s = 0; s < AT_ONCE; s++) {
                qv u[8];
                NAME(unpack)(codes + part * 64 * bits + 4 * LANES * s, bits, u);
                NAME(widen)(u, offset, tile, wide[s]);
                for (int half = 0; half < 1 + sixteens; half++)
                    NAME(fixed_scales)(&h, side, s, part, half, halves, bytes, &scale[half][s], min + s);
            }
            for (int64_t first = 0; first < rows; first += tile) {
                const kv_fixed *xs = x + first;
                fv (*a)[AT_ONCE] = acc + first;
                UNROLL for (int half = 0; half < 1 + sixteens; half++) {
                    iv sums[TILE][AT_ONCE];
                    NAME(sums)(wide, xs, 4 * half, sixteens ? 4 * half + 4 : 8, offset, sums, tile);
                    UNROLL for (int r = 0; r < tile; r++)
                        UNROLL for (int s = 0; s < AT_ONCE; s++)
                            a[r][s] = NAME(madd)(__builtin_convertvector(sums[r][s], fv), scale[half][s] * xs[r].scale, a[r][s]);
                }
                UNROLL for (int r = 0; r < tile && halves == 2; r++)
                    UNROLL for (int s = 0; s < AT_ONCE; s++) a[r][s] = NAME(madd)(min[s], NAME(splat)(xs[r].sum), a[r][s]);
            }
        }
    }
    memcpy(out, acc, rows * sizeof *acc);
}

typedef void (*NAME(fixed_tile_fn))(const uint8_t *, int, const kv_fixed *, int64_t, int64_t, int64_t, fv (*)[AT_ONCE]);
typedef struct {
    NAME(fixed_tile_fn) tiles[3]; /* of 1, 4 and, where there is room, more rows */
    void (*decode)(const uint8_t *, int, int64_t, float, float *);
} NAME(fixed_ops);

/* Row `row` of a group, times `factor`. */
INLINE void NAME(decode_row)(const uint8_t *w, int row, int64_t k, float factor, float *out, int elements, int size, int bits,
                             int offset, int halves, int bytes, int sixteens) {
    int lane = row % LANES, s = row / LANES % AT_ONCE, side = row / LANES - s;
    for (const float *end = out + k; out < end; w += GROUP * size) {
        NAME(fixed_head) h;
        NAME(read_head)(w, side, halves, bytes, &h);
        for (int part = 0; part < elements / 32; part++, out += 32) {
            qv u[8];
            NAME(unpack)(w + GROUP * (2 * halves + bytes) + part * 64 * bits + 4 * LANES * (side + s), bits, u);
            for (int half = 0; half < 2; half++) {
                fv scale, min;
                NAME(fixed_scales)(&h, side, s, part, sixteens ? half : 0, halves, bytes, &scale, &min);
                float d = scale[lane], m = min[lane];
                for (int i = 16 * half; i < 16 * half + 16; i++) {
                    float code = (float)(((const uint8_t *)(u + i / 4))[4 * lane + i % 4] - offset);
                    out[i] = (code * d + m) * factor;
                }
            }
        }
    }
}

/* Tiles of n rows; `many`: as many as there are. */
#define ROWS(n, many, lower, ...)                                                                                               \
    IN_ORDER static void NAME(tile##n##_##lower)(const uint8_t *w, int side, const kv_fixed *x, int64_t stride, int64_t blocks, \
                                                 int64_t rows, fv (*out)[AT_ONCE]) {                                            \
        NAME(fixed_tile)(w, side, x, stride, blocks, many ? rows : n, out, n, __VA_ARGS__);                                      \
    }
#if TILE == 8
#define MORE_ROWS(lower, ...) ROWS(8, 0, lower, __VA_ARGS__)
#define TILES(lower) {NAME(tile1_##lower), NAME(tile4_##lower), NAME(tile8_##lower)}
#else
#define MORE_ROWS(lower, ...)
#define TILES(lower) {NAME(tile1_##lower), NAME(tile4_##lower)}
#endif
#define FORMAT(upper, lower, id, elements, size, bits, offset, halves, bytes, sixteens)                                          \
    ROWS(1, 0, lower, elements, size, bits, offset, halves, bytes, sixteens)                                                     \
    ROWS(4, MOST_ROWS > 4, lower, elements, size, bits, offset, halves, bytes, sixteens)                                         \
    MORE_ROWS(lower, elements, size, bits, offset, halves, bytes, sixteens)                                                      \
    static void NAME(row_##lower)(const uint8_t *w, int row, int64_t k, float factor, float *out) {                              \
        NAME(decode_row)(w, row, k, factor, out, elements, size, bits, offset, halves, bytes, sixteens);                         \
    }
INTERLEAVED(FORMAT)
#undef FORMAT

static const NAME(fixed_ops) *NAME(fixed_of)(int64_t format) {
#define OPS(upper, lower, id, elements, size, bits, offset, halves, bytes, sixteens) \
    [id] = {TILES(lower), NAME(row_##lower)},
    static const NAME(fixed_ops) table[] = {INTERLEAVED(OPS)};
#undef OPS
    return table + format;
}

/* ---- rows of x --------------------------------------------------------------------------------------------------------- */

static void NAME(to_fixed)(const float *x, int64_t k, kv_fixed *out, int64_t stride) {
    for (int64_t i = 0; i < k; i += 32, out += stride) {
        uint32_t bits, most = 0;
        int32_t n[32], sums[2] = {0, 0};
        for (int j = 0; j < 32; j++) memcpy(&bits, x + i + j, 4), bits &= 0x7fffffff, most = bits > most ? bits : most;
        float largest = bits_f32(most), factor = FIXED_MOST / largest; /* NaN is the largest of all: sums are NaN then */
        if (largest < FIXED_LEAST) largest = 0, factor = 0;
        for (int j = 0; j < 32; j++) n[j] = (int32_t)(x[i + j] * factor + 12582912.0f - 12582912.0f);
        if (!(largest < INFINITY)) memset(n, 0, sizeof n), largest = NAN;
        for (int j = 0; j < 16; j++) sums[0] += n[j], sums[1] += n[j + 16];
#if BYTES && LANES == 4
        for (int j = 0; j < 32; j++) {
            int32_t high = (n[j] + 64) >> 7;
            out->eights[j / 8][j % 8] = (int8_t)high, out->eights[j / 8][8 + j % 8] = (int8_t)(n[j] - high * 128);
        }
#elif BYTES
        for (int j = 0; j < 32; j++) {
            int32_t high = (n[j] + 64) >> 7;
            out->high[j] = (int8_t)high, out->low[j] = (int8_t)(n[j] - high * 128);
        }
#else
        for (int j = 0; j < 32; j++) out->pairs[j / 4 * 4 + j % 2 * 2 + j % 4 / 2] = (int16_t)n[j];
#endif
        out->scale = largest / FIXED_MOST;
        out->sum = out->scale * (float)(sums[0] + sums[1]);
        out->less = -sums[0] - sums[1], out->less_first = -sums[0];
    }
}

typedef struct {
    const kv_weight *w;
    int64_t n_weights, m, k, ldx, ldy, accumulate, groups, groups_per_task;
    const float *x;
    float *y;
    kv_fixed *fixed;      /* MOST_ROWS rows after the other, [k / 32, rows]; the last ones fill tiles */
    const int64_t *pairs; /* row i of y is row pairs[i] there; NULL = row i */
} NAME(fixed_args);

/* Where a group of weight rows stands among those of all matrices: which of its matrix, and the first one's column in y. */
typedef struct {
    const kv_weight *w;
    int64_t group, column;
} NAME(fixed_place);

/* Rows in fixed point that `rows` rows take. */
INLINE int64_t NAME(fixed_rows_of)(int64_t rows) {
    int64_t last = rows % MOST_ROWS;
    return last > 1 ? rows + (4 - last % 4) % 4 : rows;
}

/* Rows whose blocks stand beside each other, one of which is row m. */
INLINE int64_t NAME(beside)(const NAME(fixed_args) *a, int64_t m) {
    int64_t left = a->m - m / MOST_ROWS * MOST_ROWS;
    return left < MOST_ROWS ? NAME(fixed_rows_of)(left) : MOST_ROWS;
}

INLINE kv_fixed *NAME(fixed_row)(const NAME(fixed_args) *a, int64_t m) {
    return a->fixed + m / MOST_ROWS * MOST_ROWS * (a->k / 32) + m % MOST_ROWS;
}

static void NAME(to_fixed_task)(void *arg, int64_t task, int thread) {
    const NAME(fixed_args) *a = arg;
    (void)thread;
    for (int64_t m = task * FIXED_ROWS; m < a->m && m < (task + 1) * FIXED_ROWS; m++)
        NAME(to_fixed)(a->x + m * a->ldx, a->k, NAME(fixed_row)(a, m), NAME(beside)(a, m));
}

INLINE void NAME(put_side)(const NAME(fixed_args) *a, int64_t m, int64_t column, int64_t left, fv sums) {
    float *y = a->y + (a->pairs ? a->pairs[m] : m) * a->ldy + column;
    if (left >= LANES) {
        if (a->accumulate) sums += *(const fv *)y;
        *(fv *)y = sums;
    } else {
        for (int64_t i = 0; i < left; i++) y[i] = a->accumulate ? y[i] + sums[i] : sums[i];
    }
}

static NAME(fixed_place) NAME(fixed_first)(const NAME(fixed_args) *a, int64_t group) {
    NAME(fixed_place) at = {a->w, group, 0};
    for (; at.group >= groups_of(at.w); at.w++) at.group -= groups_of(at.w), at.column += at.w->rows;
    return at;
}

INLINE void NAME(fixed_next)(NAME(fixed_place) *at) {
    if (++at->group * GROUP >= at->w->rows) at->column += at->w->rows, at->group = 0, at->w++;
}

/* Rows of x, from row m on, for which codes are unpacked once; 0 = there are none. */
INLINE int64_t NAME(fixed_count)(const NAME(fixed_args) *a, int64_t m) {
    int64_t left = a->m - m, most = left == 1 ? 1 : MOST_ROWS > TILE ? MOST_ROWS : left > 4 && TILE > 4 ? 8 : 4;
    return left < most ? left : most;
}

/* A group of weight rows, which is at `blocks`, times `rows` rows of x from row m on. */
static void NAME(fixed_group)(const NAME(fixed_args) *a, const NAME(fixed_place) *at, const uint8_t *blocks, int64_t m, int64_t rows) {
    const kv_weight *w = at->w;
    int tile = a->m - m == 1 ? 0 : a->m - m > 4 && TILE > 4 ? 2 : 1;
    for (int side = 0; side < SIDES; side += AT_ONCE) {
        fv sums[MOST_ROWS][AT_ONCE];
        NAME(fixed_of)(w->format)->tiles[tile](blocks, side, NAME(fixed_row)(a, m), NAME(beside)(a, m), a->k / 32,
                                               (rows + 3) / 4 * 4, sums);
        for (int64_t r = 0; r < rows; r++)
            for (int s = 0; s < AT_ONCE; s++) {
                int64_t row = at->group * GROUP + (side + s) * LANES;
                NAME(put_side)(a, m + r, at->column + row, w->rows - row, sums[r][s]);
            }
    }
}

/* The same of groups [first, last) where some are made for it: each once, for all rows of x. */
static void NAME(fixed_made)(const NAME(fixed_args) *a, int64_t first, int64_t last, int thread) {
    NAME(fixed_place) at = NAME(fixed_first)(a, first);
    for (int64_t g = first; g < last; g++, NAME(fixed_next)(&at)) {
        uint8_t *room = (uint8_t *)scratch(thread, GROUP * at.w->row_bytes / sizeof(float));
        const uint8_t *blocks = interleaved_group(at.w, a->k, at.group, room);
        for (int64_t m = 0, rows; (rows = NAME(fixed_count)(a, m)); m += rows) NAME(fixed_group)(a, &at, blocks, m, rows);
        if (g == last - 1 || (at.group + 1) * GROUP >= at.w->rows) read_groups(at.w, at.group, g - first + 1);
    }
}

/* Some groups of weight rows times all rows of x. */
static void NAME(fixed_task)(void *arg, int64_t task, int thread) {
    const NAME(fixed_args) *a = arg;
    int64_t first = task * a->groups_per_task, last = first + a->groups_per_task;
    if (last > a->groups) last = a->groups;
    for (int64_t i = 0; i < a->n_weights; i++)
        if (!is_kept(a->w + i)) {
            NAME(fixed_made)(a, first, last, thread);
            return;
        }
    for (int64_t m = 0, rows; (rows = NAME(fixed_count)(a, m)); m += rows) {
        NAME(fixed_place) at = NAME(fixed_first)(a, first);
        for (int64_t g = first; g < last; g++, NAME(fixed_next)(&at))
            NAME(fixed_group)(a, &at, at.w->blocks + at.group * GROUP * at.w->row_bytes, m, rows);
    }
}

static void NAME(fixed_matmul)(const kv_weight *w, int64_t n_weights, const float *x, int64_t m, int64_t k, int64_t ldx, float *y,
                               int64_t ldy, int64_t accumulate) {
    NAME(fixed_args) a = {w, n_weights, m, k, ldx, ldy, accumulate, 0, 0, x, y, fixed_rows(NAME(fixed_rows_of)(m) * (k / 32)), NULL};
    int64_t *states = begin_uses(w, n_weights);
    for (int64_t i = 0; i < n_weights; i++) a.groups += groups_of(w + i);
    a.groups_per_task = a.groups / (pool.tuner.limit * 8);
    if (a.groups_per_task < 1) a.groups_per_task = 1;
    parallel((m + FIXED_ROWS - 1) / FIXED_ROWS, NAME(to_fixed_task), &a);
    parallel_that((a.groups + a.groups_per_task - 1) / a.groups_per_task, NAME(fixed_task), &a, !states);
    if (states) end_uses(w, n_weights, states);
}

#include "cpu_fixed_experts.h"

static void NAME(fixed_decode)(const kv_weight *w, const int64_t *ids, int64_t n, int64_t k, float scale, float *out) {
    const NAME(fixed_ops) *ops = NAME(fixed_of)(w->format);
    for (int64_t i = 0; i < n; i++)
        ops->decode(w->blocks + ids[i] / GROUP * GROUP * w->row_bytes, (int)(ids[i] % GROUP), k, scale, out + i * k);
}

static const fixed_kernels NAME(fixed) = {NAME(fixed_matmul), NAME(fixed_matmul_experts), NAME(fixed_decode)};

#undef qv
#undef EACH_BYTE
#undef HIGH_HALVES
#undef fv
#undef iv
#undef INLINE
#undef UNROLL
#undef TILE
#undef ROWS
#undef MORE_ROWS
#undef TILES
#undef AT_ONCE
#undef MOST_ROWS
#undef SIDES
#undef CODES
#undef IN_REGISTER
#undef IN_ORDER
#undef IN_MEMORY
#undef READ_AGAIN
