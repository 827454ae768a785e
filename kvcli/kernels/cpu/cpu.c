/* The CPU backend: float32 arithmetic over packed weights and paged K/V. Called through ctypes (backend.py).
 *
 * Rule of the house: every output element is computed by one fixed sequence of operations that depends on its own
 * row and position only, never on how many rows a call has or on the number of threads. Prefill, decode and any
 * chunking therefore give the same bits on one machine.
 *
 * cpu_body.h holds the kernels; it is compiled once per instruction set and the best one is chosen at load. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include "cpu_arm.h"
#endif

/* ---- shapes shared with backend.py (keep the two in step) ------------------------------------------------ */

typedef struct { /* what a matrix is interleaved from when it is used */
    const uint8_t *source; /* its blocks, row by row: of a file */
    _Atomic int64_t state; /* see cpu_interleave.h */
} kv_later;

typedef struct { /* rows of one packed weight matrix; interleaved: as cpu_interleave.h has them */
    const uint8_t *blocks;
    int64_t rows, row_bytes, format, interleaved;
    kv_later *later; /* NULL = the blocks are there */
} kv_weight;

typedef struct { /* a cache type; `Numbers` of codecs.py says what they are */
    int64_t bits, mantissa, packing, lowest, tries;
    double largest;
} kv_codec;

typedef struct { /* K rows, V rows, then scales where a codec has them; sizes and offsets in bytes */
    int64_t bytes, k_row, v_row, v_offset, k_scales, v_scales;
    kv_codec codec_k, codec_v;
} kv_record;

typedef struct { /* rows first + lo .. first + hi - 1 of a page, shown to queries in [since, until); `Entries` of paged.py */
    int64_t address, first, lo, hi, since, until, turned;
    int64_t open, place; /* whether it is of the open class; where its class's list has it */
    int64_t summary;     /* what tells of its keys in the first layer; 0 = it is read in any case */
} kv_entry;

typedef struct { /* one layer in one class of pages; a record is one (page, kv head) */
    const int64_t *into; /* addresses of the pages that a step writes into, from position `into_first` on; 0 = none */
    int64_t offset;      /* from a page's address to this layer's first record */
    kv_record record;
} kv_class;

typedef struct { /* one layer's K/V; all classes' entries in the order of `first` */
    const kv_entry *entries;
    int64_t n_entries, sealed; /* sealed: whether there is an open class */
    kv_class closed, open;
    int64_t into_first, into_place; /* into_place: where the angles of the pages in `into` stand, counted like `place` */
    int64_t page_size, kv_heads, dim_k, dim_v;
    const float *static_k, *static_v; /* fp8: one scale a head */
    const float *centre;              /* [kv_heads, dim_k]: what sealed keys lack, before RoPE; NULL = nothing */
    const float *cos, *sin;           /* its RoPE for each CENTRE_ROWS rows of the closed pages by place, [n, rope_half] */
    int64_t rope_half, exact; /* exact: products with keys are in floats */
    int64_t joined; /* whether queries go on behind dim_k with dim_v elements that are multiplied with values */
    int64_t pages, means, summary_offset; /* `Choice` of paged.py; `SummaryLayout` of codecs.py */
    double threshold; /* with pages = 0 too: everything is read */
} kv_paged;

enum { SOFTMAX, SIGMOID, CHOSEN };

typedef struct { /* how experts are chosen; `Routing` of routing.py says what the fields are */
    int64_t experts, used, gating, normed, groups, groups_used, best;
    float scale;
} kv_routing;

typedef struct { /* rows [row, row + rows) of a step are those from position `start` on of a sequence, behind the cache `kv` */
    const kv_paged *kv;
    int64_t row, rows, start;
    int64_t *mass; /* what rows get of queries at positions from `since` on is added here, see paged.py; it may be NULL */
    int64_t ld_mass, since, largest; /* largest: the most that one query gives stays instead */
} kv_part;

/* Block formats: name, name in functions, id, elements and bytes of a block; see blockformats.py. */
#define BLOCK_FORMATS(F) \
    F(F32, f32, 0, 1, 4) F(F16, f16, 1, 1, 2) F(BF16, bf16, 30, 1, 2) F(F64, f64, 28, 1, 8) \
    F(I8, i8, 24, 1, 1) F(I16, i16, 25, 1, 2) F(I32, i32, 26, 1, 4) F(I64, i64, 27, 1, 8) \
    F(Q4_0, q4_0, 2, 32, 18) F(Q4_1, q4_1, 3, 32, 20) F(Q5_0, q5_0, 6, 32, 22) F(Q5_1, q5_1, 7, 32, 24) \
    F(Q8_0, q8_0, 8, 32, 34) F(Q2_K, q2_k, 10, 256, 84) F(Q3_K, q3_k, 11, 256, 110) F(Q4_K, q4_k, 12, 256, 144) \
    F(Q5_K, q5_k, 13, 256, 176) F(Q6_K, q6_k, 14, 256, 210) \
    F(IQ1_S, iq1_s, 19, 256, 50) F(IQ1_M, iq1_m, 29, 256, 56) F(IQ2_XXS, iq2_xxs, 16, 256, 66) \
    F(IQ2_XS, iq2_xs, 17, 256, 74) F(IQ2_S, iq2_s, 22, 256, 82) F(IQ3_XXS, iq3_xxs, 18, 256, 98) \
    F(IQ3_S, iq3_s, 21, 256, 110) F(IQ4_NL, iq4_nl, 20, 32, 18) F(IQ4_XS, iq4_xs, 23, 256, 136) \
    F(MXFP4, mxfp4, 39, 32, 17) F(NVFP4, nvfp4, 40, 64, 36) F(Q1_0, q1_0, 41, 128, 18) \
    F(TQ1_0, tq1_0, 34, 256, 54) F(TQ2_0, tq2_0, 35, 256, 66)

#define CODEC(bits, mantissa) ((bits) * 32 + (mantissa)) /* how elements are written; mantissa 0 = codes on a grid */
#define CENTRE_ROWS 16 /* rows that share one rotation of the mean */
#define MOST_SLOTS 256 /* of a page, with room for whole vectors */
#define MASS_UNIT 4194304.0f /* a probability of 1 in `kv_part.mass`; see paged.py */
#define CHOICE_BLOCK 128 /* queries that choose together what they read; blocks begin at multiples */
#define LOOK_ROWS 64  /* positions that attention looks at together; pages have a divisor or a multiple of it */
#define SPAN_ROWS 256 /* it is accumulated in spans of this many, combined in order */

#include "cpu_pool.h"
#include "cpu_pairs.h"

/* ---- scalar conversions ---------------------------------------------------------------------------------- */

static inline float bits_f32(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t f32_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float soft_half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7fff;
    if (mag >= 0x7c00) return bits_f32(sign | 0x7f800000 | (mag & 0x3ff) << 13);
    float f = bits_f32(mag << 13) * 0x1p112f; /* exact: also scales subnormals */
    return bits_f32(f32_bits(f) | sign);
}

static inline uint16_t soft_float_to_half(float f) {
    uint32_t u = f32_bits(f), sign = u >> 16 & 0x8000, mag = u & 0x7fffffff;
    if (mag > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (mag >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (mag < 0x38800000) { /* subnormal half: let the float adder round to 2^-24 */
        float r = bits_f32(mag) + 0.5f;
        return (uint16_t)(sign | (f32_bits(r) - 0x3f000000));
    }
    return (uint16_t)(sign | (((mag + 0xfff + (mag >> 13 & 1)) >> 13) - (112 << 10)));
}

static inline uint16_t float_to_bf16(float f) {
    uint32_t u = f32_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline uint16_t read16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static inline uint32_t read32(const void *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline uint64_t read64(const void *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

/* ---- tables of block formats; kernels/grids.py ------------------------------------------------------------------- */

enum { IQ2_XXS_GRID, IQ2_XS_GRID, IQ2_S_GRID, IQ3_XXS_GRID, IQ3_S_GRID, IQ1_S_GRID, N_GRIDS };
static const int8_t *grids[N_GRIDS];
static const int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t DOUBLED_E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Four times seven bits -> four bytes, each with an even number of bits: the eighth is what it lacks to that. */
static inline uint32_t even_signs(uint32_t w) {
    uint32_t s = (w & 0x7f) | (w & 0x3f80) << 1 | (w & 0x1fc000) << 2 | (w & 0xfe00000) << 3;
    uint32_t parity = s ^ s >> 4;
    parity ^= parity >> 2;
    return s | ((parity ^ parity >> 1) & 0x01010101) << 7;
}

/* Half of an unsigned e4m3 float; 0x7f is 0, and its uppermost bit says nothing. */
static inline float e4m3_halved(uint8_t s) {
    float m = (float)(s & 7);
    if (s == 0x7f) return 0;
    return (s & 0x78 ? (1 + m / 8) * bits_f32((uint32_t)(120 + (s >> 3 & 15)) << 23) : m * 0x1p-9f) * 0.5f;
}

enum { SILU, GELU, RELU2, CLAMPED }; /* activations; GELU by its tanh form. CLAMPED: `glu` of pointwise.py */
#define CLAMP 7.0f

#ifndef KV_AVX_VNNI /* whether the compiler has these instructions */
#ifdef __clang__
#define KV_AVX_VNNI (__clang_major__ >= 13)
#else
#define KV_AVX_VNNI (__GNUC__ >= 11)
#endif
#endif

/* ---- products with keys in integers ------------------------------------------------------------------------------- */

#define MULTIPLES_MOST 16256.0f /* multiples of its scale that the largest element of a query is: 127 * 128 */
#define KEYS_QUERIES 4
#define AT(p, bytes) ((const kv_multiples *)((const uint8_t *)(p) + (bytes)))

typedef struct { /* a query as multiples of a scale; parts: of each `each` dims, in the order of codes, the high ones, then the low */
    float scale;
    int32_t less; /* twice what the middle of the codes adds to a product */
    int32_t parts[];
} kv_multiples;

typedef struct {
    int64_t lanes; /* a page has whole multiples of as many slots, a key of four times as many codes */
    int64_t each;  /* see kv_multiples */
    int64_t taken; /* what `dots` takes off codes of 8 bits */
    void (*fold)(const uint8_t *, int64_t, int64_t, int64_t, int64_t, int64_t, uint8_t *); /* NULL = keys are read as they are */
    void (*dots)(const uint8_t *, int64_t, int64_t, int64_t, int64_t, int64_t, const kv_multiples *, int64_t, int, float *, int64_t);
} kv_keys;

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define NAME(x) x##_avx512vnni
#define LANES 16
#include "cpu_keys.h"
#undef NAME
#undef LANES
#pragma GCC pop_options

#if KV_AVX_VNNI
#pragma GCC push_options
#pragma GCC target("avxvnni,avx2,fma,f16c")
#define NAME(x) x##_avxvnni
#define LANES 8
#include "cpu_keys.h"
#undef NAME
#undef LANES
#pragma GCC pop_options
#endif
#endif

#if KV_NEON_DOT
TARGET_NEON_DOT
#define NAME(x) x##_neondot
#define MATRIX 0
#include "cpu_neon_keys.h"
#undef NAME
#undef MATRIX
END_TARGET
#endif

#if KV_NEON_I8MM
TARGET_NEON_I8MM
#define NAME(x) x##_neoni8mm
#define MATRIX 1
#include "cpu_neon_keys.h"
#undef NAME
#undef MATRIX
END_TARGET
#endif

#define MAX_CONV 8      /* rows that a convolution reads, at most: states.py */
#define CONV_COLUMNS 64 /* of a task */

typedef struct { /* Carried of states.py: rows [lo, hi) of a step; source NULL = zeros */
    int64_t lo, hi;
    const float *source;
    float *target;
} kv_carried;

#define MAX_HEAD 256 /* elements of a head with a state */

typedef struct { /* DeltaLayer of states.py */
    int64_t key_heads, value_heads, dim_k, dim_v, kernel, tiled;
    const float *conv, *decay, *time_bias, *norm;
    float eps;
} kv_delta;

typedef struct { /* MambaLayer of states.py */
    int64_t heads, dim, groups, state, kernel;
    const float *conv, *conv_bias, *decay, *time_bias, *skip, *norm;
    float eps;
} kv_mamba_layer;

static const kv_keys *int_keys; /* NULL = there is no instruction for it */

/* ---- one copy of the kernels per instruction set ----------------------------------------------------------- */

typedef struct {
    void (*matmul)(const kv_weight *, int64_t, const float *, int64_t, int64_t, int64_t, float *, int64_t, int64_t);
    void (*matmul_experts)(const kv_expert_products *);
    void (*route)(const float *, int64_t, const kv_routing *, const float *, int64_t *, float *);
    void (*mix)(const float *, const float *, int64_t, int64_t, int64_t, float *);
    void (*rows)(const kv_weight *, const int64_t *, int64_t, int64_t, float, float *);
    void (*norm)(const float *, int64_t, const float *, const float *, int64_t, float, int64_t, int64_t, float *, int64_t);
    void (*add)(float *, int64_t, const float *, int64_t, float, int64_t, int64_t);
    void (*rope)(float *, int64_t, int64_t, int64_t, int64_t, int64_t, const float *, const float *);
    void (*activate)(const float *, int64_t, int64_t, int64_t, int64_t, float *);
    void (*rotate)(float *, int64_t, int64_t, int64_t, int64_t);
    void (*store)(const float *, int64_t, const float *, int64_t, const kv_part *, int64_t);
    void (*seal)(const kv_paged *, int64_t, int64_t);
    int (*has_codec)(const kv_codec *);
    void (*attention)(const float *, int64_t, const float *, int64_t, int64_t, int64_t, float, float, const float *,
                      const kv_part *, int64_t, float *);
    void (*short_conv)(const float *, int64_t, const float *, const float *, int64_t, int64_t, const kv_carried *, int64_t, float *);
    void (*delta_net)(const float *, int64_t, const kv_delta *, const kv_carried *, int64_t, float *, float *);
    void (*mamba)(const float *, int64_t, const kv_mamba_layer *, const kv_carried *, int64_t, float *, float *);
} kernels;

/* ---- products with rows in fixed point ----------------------------------------------------------------------- */

#include "cpu_interleave.h"

#define FIXED_MOST 16256.0f /* multiples of its scale that the largest of 32 numbers is */
#define FIXED_LEAST 1e-30f  /* a largest number below it counts as zero */
#define FIXED_ROWS 8        /* that a task makes */
#define FIXED_SLAB 256      /* rows that are there at a time */
#define FIXED_PAIRS 2048    /* the same of experts */

typedef struct { /* 32 numbers of a row of x: whole multiples of `scale` */
    union {
        struct {
            int8_t high[32], low[32]; /* 128 * high + low */
        };
        int8_t eights[4][16]; /* of eight: the high ones, then the low ones */
        int16_t pairs[32];    /* of four: the first and the third, the second and the fourth */
    };
    float scale, sum; /* `sum` of the numbers */
    int32_t less, less_first; /* minus the sum of all multiples, and of the first 16 */
} kv_fixed;

typedef struct {
    void (*matmul)(const kv_weight *, int64_t, const float *, int64_t, int64_t, int64_t, float *, int64_t, int64_t);
    void (*matmul_experts)(const kv_expert_products *);
    void (*rows)(const kv_weight *, const int64_t *, int64_t, int64_t, float, float *);
} fixed_kernels;

/* Room for so many blocks, kept from call to call of a thread: two may compute at once. */
static kv_fixed *fixed_rows(int64_t blocks) {
    static _Thread_local kv_fixed *rows;
    static _Thread_local int64_t room;
    if (blocks > room) {
        free(rows);
        rows = aligned_alloc(64, (size_t)(blocks + 3) / 4 * 4 * sizeof(kv_fixed));
        if (!rows) abort();
        room = blocks;
    }
    return rows;
}

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define NAME(x) x##_avx512vnni
#define LANES 16
#define BYTES 1
#include "cpu_fixed.h"
#undef NAME
#undef LANES
#undef BYTES
#pragma GCC pop_options

#if KV_AVX_VNNI
#pragma GCC push_options
#pragma GCC target("avxvnni,avx2,fma,f16c")
#define NAME(x) x##_avxvnni
#define LANES 8
#define BYTES 1
#include "cpu_fixed.h"
#undef NAME
#undef LANES
#undef BYTES
#pragma GCC pop_options
#endif

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define NAME(x) x##_avx2
#define LANES 8
#define BYTES 0
#include "cpu_fixed.h"
#undef NAME
#undef LANES
#undef BYTES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define NAME(x) x##_avx512
#define VL 16
#define ROWS_TILE 4
#include "cpu_body.h"
#undef NAME
#undef VL
#undef ROWS_TILE
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define NAME(x) x##_avx2
#define VL 8
#define ROWS_TILE 2
#include "cpu_body.h"
#undef NAME
#undef VL
#undef ROWS_TILE
#pragma GCC pop_options
#endif

#if defined(__aarch64__)
#define LANES 4

#if KV_NEON_I8MM
TARGET_NEON_I8MM
#define NAME(x) x##_neoni8mm
#define BYTES 1
#define MATRIX 1
#include "cpu_fixed.h"
#undef NAME
#undef BYTES
#undef MATRIX
END_TARGET
#endif

#if KV_NEON_DOT
TARGET_NEON_DOT
#define NAME(x) x##_neondot
#define BYTES 1
#define MATRIX 0
#include "cpu_fixed.h"
#undef NAME
#undef BYTES
#undef MATRIX
END_TARGET
#endif

#define NAME(x) x##_neon
#define BYTES 0
#include "cpu_fixed.h"
#undef BYTES
#undef LANES

#define VL 4
#define NEON 1
#define ROWS_TILE 4
#include "cpu_body.h"
#undef NAME
#undef VL
#undef NEON
#undef ROWS_TILE
#endif

#define NAME(x) x##_base
#define VL 4
#define ROWS_TILE 2
#include "cpu_body.h"

static const kernels *active = &kernels_base;
static const fixed_kernels *fixed; /* NULL = there are none here */

#if defined(__x86_64__)
#include <cpuid.h>

static int has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#if KV_AVX_VNNI
static int has_avx_vnni(void) { /* which compilers do not all know by name */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}
#endif
#endif

/* ---- entry points ------------------------------------------------------------------------------------------ */

/* The checksum of the sources that this was compiled from; see sources.py. */
#ifndef KV_SOURCES
#define KV_SOURCES ""
#endif
const char *kv_sources(void) { return KV_SOURCES; }

/* Elements * 65536 + bytes of a block of that format; 0 = it cannot be computed with here. */
int64_t kv_block(int64_t format) {
#define SIZE(upper, name, id, elements, size) case id: return (elements) << 16 | (size);
    switch (format) {
        BLOCK_FORMATS(SIZE)
    }
#undef SIZE
    return 0;
}

/* The grids, in the order of the enum; they stay the caller's. */
void kv_grids(const int8_t *const *given) { memcpy(grids, given, sizeof grids); }

/* Choose the instruction set ("" = the best here) and start the workers. Returns its name, NULL if unknown here. */
const char *kv_init(int threads, const char *isa) {
    const struct {
        int here;
        const char *name;
        const kernels *all;
        const fixed_kernels *products;
        const kv_keys *keys;
    } *choice, choices[] = {
#if defined(__x86_64__)
        {has_avx512() && __builtin_cpu_supports("avx512vnni"), "avx512vnni", &kernels_avx512, &fixed_avx512vnni, &keys_avx512vnni},
        {has_avx512(), "avx512", &kernels_avx512, &fixed_avx2, NULL},
#if KV_AVX_VNNI
        {has_avx2() && has_avx_vnni(), "avxvnni", &kernels_avx2, &fixed_avxvnni, &keys_avxvnni},
#endif
        {has_avx2(), "avx2", &kernels_avx2, &fixed_avx2, NULL},
#endif
#if KV_NEON_I8MM
        {has_neon_dot() && has_neon_i8mm(), "neoni8mm", &kernels_neon, &fixed_neoni8mm, &keys_neoni8mm},
#endif
#if KV_NEON_DOT
        {has_neon_dot(), "neondot", &kernels_neon, &fixed_neondot, &keys_neondot},
#endif
#if defined(__aarch64__)
        {1, "neon", &kernels_neon, &fixed_neon, NULL},
#endif
        {1, "base", &kernels_base, NULL, NULL},
    };
    size_t count = sizeof choices / sizeof *choices;
    for (choice = choices; choice < choices + count; choice++)
        if (choice->here && (!*isa || !strcmp(isa, choice->name))) break;
    if (choice == choices + count) return NULL;
    active = choice->all, fixed = choice->products, int_keys = choice->keys;
    start_threads(threads);
    return choice->name;
}

/* Whether there are products of interleaved matrices here. */
int kv_has_fixed(void) { return fixed != NULL; }

/* Threads that may take part in a call. */
int kv_threads(void) { return (int)pool.tuner.limit; }

/* How many of `n` matrices, from the first on, are computed alike; adds up their rows. */
static int64_t alike(const kv_weight *w, int64_t n, int64_t *rows) {
    int64_t i = 0;
    for (*rows = 0; i < n && w[i].interleaved == w->interleaved; i++) *rows += w[i].rows;
    return i;
}

/* y[m, 0..n) = x[m, 0..k) . W^T (+ y when accumulate) for the stacked rows of `n_weights` matrices. */
void kv_matmul(const kv_weight *w, int64_t n_weights, const float *x, int64_t m, int64_t k, int64_t ldx, float *y,
               int64_t ldy, int64_t accumulate) {
    for (int64_t n, rows; n_weights; w += n, n_weights -= n, y += rows) {
        n = alike(w, n_weights, &rows);
        if (m > FIXED_SLAB) expect_uses(w, n);
        if (w->interleaved)
            for (int64_t i = 0; i < m; i += FIXED_SLAB)
                fixed->matmul(w, n, x + i * ldx, m - i < FIXED_SLAB ? m - i : FIXED_SLAB, k, ldx, y + i * ldy, ldy, accumulate);
        else
            active->matmul(w, n, x, m, k, ldx, y, ldy, accumulate);
    }
}

/* y[p, 0..n) = x[p / each, 0..k) . W^T for the stacked rows of the matrices of expert ids[p], which are `n_weights` from
 * w[ids[p] * n_weights] on. */
void kv_matmul_experts(const kv_weight *w, int64_t n_weights, int64_t experts, const int64_t *ids, int64_t pairs, int64_t each,
                       const float *x, int64_t k, int64_t ldx, float *y, int64_t ldy) {
    int64_t *order = malloc((size_t)(pairs + experts + 1) * sizeof(int64_t)), *end = order + pairs;
    if (!order) abort();
    sort_pairs(ids, pairs, experts, order, end);
    for (int64_t first = 0, n, rows; first < n_weights; first += n, y += rows) {
        n = alike(w + first, n_weights - first, &rows);
        kv_expert_products e = {w + first, n, n_weights, experts, pairs, each, order, end, x, k, ldx, y, ldy};
        (w[first].interleaved ? fixed->matmul_experts : active->matmul_experts)(&e);
    }
    free(order);
}

/* The experts of t rows from their logits [t, experts]: ids and weights [t, used]. `bias` is added to the scores by which
 * they are chosen; NULL = none. */
void kv_route(const float *logits, int64_t t, const kv_routing *r, const float *bias, int64_t *ids, float *weights) {
    active->route(logits, t, r, bias, ids, weights);
}

/* out[i, 0..d) = the sum of y[i, j, 0..d) * weights[i, j] over j < n, in order. */
void kv_mix(const float *y, const float *weights, int64_t t, int64_t n, int64_t d, float *out) {
    active->mix(y, weights, t, n, d, out);
}

/* out[i] = scale * row ids[i] of the matrix, decoded to float32. */
void kv_rows(const kv_weight *w, const int64_t *ids, int64_t n, int64_t k, float scale, float *out) {
    if (w->interleaved && !is_kept(w)) {
        kv_weight source = source_of(w);
        active->rows(&source, ids, n, k, scale, out);
    } else {
        (w->interleaved ? fixed->rows : active->rows)(w, ids, n, k, scale, out);
    }
}

/* y[i] = (x[i] - m) / sqrt(mean((x[i] - m)^2) + eps) * weight + bias for n rows of length d; m is 0, or where `centred` the
 * mean. bias may be NULL. */
void kv_norm(const float *x, int64_t ldx, const float *weight, const float *bias, int64_t centred, float eps, int64_t n,
             int64_t d, float *y, int64_t ldy) {
    active->norm(x, ldx, weight, bias, centred, eps, n, d, y, ldy);
}

/* x[i, 0..d) += scale * y[i, 0..d) for n rows of x that are `ldx` apart, of y `ldy`; 0 = one row for all. */
void kv_add(float *x, int64_t ldx, const float *y, int64_t ldy, float scale, int64_t n, int64_t d) {
    active->add(x, ldx, y, ldy, scale, n, d);
}

/* Rotate dims [0, rope_dim) of every head in place, half-split order; cos/sin are [t, rope_dim / 2]. */
void kv_rope(float *x, int64_t ldx, int64_t t, int64_t heads, int64_t dim, int64_t rope_dim, const float *cos,
             const float *sin) {
    active->rope(x, ldx, t, heads, dim, rope_dim, cos, sin);
}

/* out = act(x) for x [t, f], or gated act(x[:, :f]) * x[:, f:]; act 0 = SiLU, 1 = GELU (tanh form), 2 = squared ReLU,
 * 3 = the clamped gates of gpt-oss. */
void kv_activate(const float *x, int64_t t, int64_t f, int64_t act, int64_t gated, float *out) {
    active->activate(x, t, f, act, gated, out);
}

/* Hadamard rotation in place of every head of t rows, in blocks of the largest power of two that divides dim. */
void kv_rotate(float *x, int64_t ldx, int64_t t, int64_t heads, int64_t dim) { active->rotate(x, ldx, t, heads, dim); }

/* Encode rows [first, end) of the open pages into sealed ones. */
void kv_seal(const kv_paged *kv, int64_t first, int64_t end) { active->seal(kv, first, end); }

/* Encode the rows of K and V of each part into its pages. */
void kv_store(const float *k, int64_t ldk, const float *v, int64_t ldv, const kv_part *parts, int64_t n_parts) {
    active->store(k, ldk, v, ldv, parts, n_parts);
}

/* Whether rows of that cache type can be read here. */
int kv_has_codec(const kv_codec *codec) { return active->has_codec(codec); }

/* out[row, heads * dim_v]: causal attention of the queries of each part over its entries; window 0 = all. turned: the queries
 * for turned entries, NULL = the same ones. sinks: a logit of each head that takes part in the softmax, NULL = none. */
void kv_attention(const float *q, int64_t ldq, const float *turned, int64_t ld_turned, int64_t heads, int64_t window, float scale,
                  float softcap, const float *sinks, const kv_part *parts, int64_t n_parts, float *out) {
    active->attention(q, ldq, turned, ld_turned, heads, window, scale, softcap, sinks, parts, n_parts, out);
}

/* out [t, d]: projections b, c, z of each row side by side in x; b * z convolved with weight [d, kernel], + bias (NULL = none),
 * times c. States are the last kernel - 1 rows of b * z. */
void kv_short_conv(const float *x, int64_t ldx, const float *weight, const float *bias, int64_t d, int64_t kernel,
                   const kv_carried *carried, int64_t n, float *out) {
    active->short_conv(x, ldx, weight, bias, d, kernel, carried, n, out);
}

/* out [t, value_heads * dim_v]: a gated delta network from its projections; see reference/deltanet.py. `mixed` has room for the
 * convolved channels of all rows. */
void kv_delta_net(const float *x, int64_t ldx, const kv_delta *layer, const kv_carried *carried, int64_t n, float *mixed,
                  float *out) {
    active->delta_net(x, ldx, layer, carried, n, mixed, out);
}

/* out [t, heads * dim]: Mamba-2 from its projections; see reference/mamba.py. `mixed`: as above. */
void kv_mamba(const float *x, int64_t ldx, const kv_mamba_layer *layer, const kv_carried *carried, int64_t n, float *mixed,
              float *out) {
    active->mamba(x, ldx, layer, carried, n, mixed, out);
}

#include "cpu_calls.h"
