/* The kernels for NEON against scalar ones, without Python: test_neon.py compiles this for aarch64 and runs it there, or in an
 * emulator. It prints the instruction set that is chosen here, then each that was checked; what differs ends it with 1. */

#include "cpu.c"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define FAIL(...) (printf(__VA_ARGS__), puts(""), exit(1))
#define MOST_K 1024

static uint64_t state = 88172645463325252u;

static uint64_t any(void) { /* xorshift */
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static float normal(void) { /* nearly: a sum of twelve */
    float sum = -6;
    for (int i = 0; i < 12; i++) sum += (float)(any() >> 40) * 0x1p-24f;
    return sum;
}

static void fill(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = normal();
}

static void fill_bytes(uint8_t *p, int64_t n) {
    for (int64_t i = 0; i < n; i++) p[i] = (uint8_t)any();
}

static int same(float a, float b) { return f32_bits(a) == f32_bits(b) || (a != a && b != b); }

static void expect_near(const char *what, const float *found, const float *wanted, int64_t n, float most) {
    for (int64_t i = 0; i < n; i++)
        if (!(fabsf(found[i] - wanted[i]) <= most)) FAIL("%s: element %ld is %g, not %g", what, (long)i, found[i], wanted[i]);
}

/* Memory that ends where nothing may be read. */
static uint8_t *guarded(size_t n) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (n + page - 1) / page * page;
    uint8_t *p = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + whole, page, PROT_NONE)) FAIL("no memory");
    return p + whole - n;
}

static const struct { int64_t id, elements, size; } FORMATS[] = {
#define ROW(upper, name, id, elements, size) {id, elements, size},
    BLOCK_FORMATS(ROW)
#undef ROW
};

/* Blocks of any bits that are numbers of which sums can be made. */
static uint8_t *random_blocks(int format, int64_t blocks) {
    int64_t elements = FORMATS[format].elements, size = FORMATS[format].size, zero = 0;
    uint8_t *all = guarded((size_t)(blocks * size));
    for (int64_t b = 0; b < blocks; b++)
        for (int good = 0; !good;) {
            kv_weight w = {all + b * size, 1, size, FORMATS[format].id, 0};
            float values[MOST_K];
            fill_bytes(all + b * size, size);
            kernels_base.rows(&w, &zero, 1, elements, 1.0f, values);
            good = 1;
            for (int64_t i = 0; i < elements; i++) good = good && fabsf(values[i]) < 1e15f;
        }
    return all;
}

/* ---- rows in fixed point --------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t id, elements, size;
    int offset, halves, bytes, sixteens;
    void (*codes)(const uint8_t *, int, uint8_t *);
} interleaved_format;

static const interleaved_format INTERLEAVED_FORMATS[] = {
#define ROW(upper, lower, id, elements, size, bits, offset, halves, bytes, sixteens) \
    {id, elements, size, offset, halves, bytes, sixteens, codes_##lower},
    INTERLEAVED(ROW)
#undef ROW
};

/* Scale and minimum of columns 32 * part + 16 * half on. */
static void scales_of(const interleaved_format *f, const uint8_t *block, int part, int half, float *scale, float *min) {
    const uint8_t *numbers = block + halves_at(f->id);
    float d = soft_half_to_float(read16(numbers)), factor = 1, less = -1;
    *min = f->halves == 2 ? soft_half_to_float(read16(numbers + 2)) : 0;
    if (f->bytes == 12) scale_min_base(block + 4, part, &factor, &less), *min = -(*min * less);
    if (f->bytes == 16) factor = (float)(int8_t)block[192 + 2 * part + half];
    *scale = f->bytes ? d * factor : d;
}

/* A weight row times a row of x, as cpu_fixed.h says it. */
static float fixed_product(const interleaved_format *f, const uint8_t *row, const float *x, int64_t k) {
    float acc = 0;
    for (int64_t i = 0; i < k; i += 32) {
        const uint8_t *block = row + i / f->elements * f->size;
        int part = (int)(i % f->elements / 32);
        float largest = 0, scale = 0, min = 0, step;
        int32_t all = 0, n[32];
        uint8_t codes[32];
        for (int j = 0; j < 32; j++) largest = fabsf(x[i + j]) > largest ? fabsf(x[i + j]) : largest;
        if (largest < FIXED_LEAST) largest = 0;
        for (int j = 0; j < 32; j++) all += n[j] = largest ? (int32_t)rintf(x[i + j] * (FIXED_MOST / largest)) : 0;
        step = largest / FIXED_MOST;
        f->codes(block, part, codes);
        for (int half = 0; half < 1 + f->sixteens; half++) {
            int32_t sum = 0;
            for (int j = 16 * half; j < (f->sixteens ? 16 * half + 16 : 32); j++) sum += (codes[j] - f->offset) * n[j];
            scales_of(f, block, part, half, &scale, &min);
            acc = fmaf((float)sum, scale * step, acc);
        }
        if (f->halves == 2) acc = fmaf(min, step * (float)all, acc);
    }
    return acc;
}

static void check_fixed(const interleaved_format *f) {
    enum { ROWS = 45, X_ROWS = 37 };
    int64_t k = f->elements == 32 ? 160 : 2 * f->elements, row_bytes = k / f->elements * f->size, ids[] = {44, 0, 17, 31}, format = 0;
    while (FORMATS[format].id != f->id) format++;
    uint8_t *blocks = random_blocks((int)format, ROWS * k / f->elements), *placed = guarded((size_t)(48 * row_bytes));
    float *x = malloc(sizeof(float) * (size_t)(X_ROWS * (k + 5))), y[X_ROWS][ROWS + 3], decoded[2][4 * MOST_K];
    kv_weight plain = {blocks, ROWS, row_bytes, f->id, 0}, beside = {placed, ROWS, row_bytes, f->id, 1};
    kv_interleave(&plain, k, placed);
    for (int64_t i = 0; i < X_ROWS * (k + 5); i++) x[i] = i % (k + 5) < k ? normal() : NAN;
    for (int64_t r = 0; r < X_ROWS; r++) x[r * (k + 5) + 3] *= 50;
    memset(x + 32, 0, 32 * sizeof(float)), x[64] = x[65] = 1e-36f;
    for (int64_t m = 1; m <= X_ROWS; m = m < 6 ? m + 1 : m == 6 ? 32 : m + 5) {
        memset(y, 0xff, sizeof y);
        kv_matmul(&beside, 1, x, m, k, k + 5, y[0], ROWS + 3, 0);
        for (int64_t r = 0; r < m; r++)
            for (int64_t n = 0; n < ROWS + 3; n++) {
                float wanted = n < ROWS ? fixed_product(f, blocks + n * row_bytes, x + r * (k + 5), k) : NAN;
                if (!same(y[r][n], wanted))
                    FAIL("format %ld, %ld rows: [%ld, %ld] is %a, not %a", (long)f->id, (long)m, (long)r, (long)n, y[r][n], wanted);
            }
    }
    kv_rows(&beside, ids, 4, k, 3.0f, decoded[0]);
    kernels_base.rows(&plain, ids, 4, k, 3.0f, decoded[1]);
    for (int64_t i = 0; i < 4 * k; i++)
        if (decoded[0][i] != decoded[1][i]) FAIL("format %ld: element %ld of rows", (long)f->id, (long)i);
    free(x);
}

/* ---- products with keys in integers ------------------------------------------------------------------------------------- */

static void check_keys(int bits, int64_t dim, int64_t lo, int64_t hi) {
    enum { SLOTS = 24, QUERIES = 4 };
    int64_t row = dim * bits / 8, ldq = (int64_t)sizeof(kv_multiples) + 2 * dim + 12, quarter = dim / 4;
    uint8_t *keys = guarded((size_t)(SLOTS * row)), *queries = calloc(QUERIES, (size_t)ldq);
    float q[512], out[QUERIES][SLOTS + 4];
    int32_t room[2 * 512];
    kv_codec codec = {bits, 0, 4, bits == 8, 1, 0.0};
    fill_bytes(keys, SLOTS * row);
    for (int n = 1; n <= QUERIES; n++) {
        int32_t multiples[QUERIES][512];
        for (int r = 0; r < n; r++) {
            kv_multiples *made = (kv_multiples *)(queries + r * ldq);
            fill(q, dim);
            to_multiples_neon(q, 0, dim, &codec, made, room);
            memcpy(multiples[r], room, (size_t)dim * sizeof(int32_t));
        }
        memset(out, 0xff, sizeof out);
        int_keys->dots(keys, row, lo, hi, dim, bits, (const kv_multiples *)queries, ldq, n, out[0], SLOTS + 4);
        for (int r = 0; r < QUERIES; r++)
            for (int64_t j = 0; j < SLOTS + 4; j++) {
                int64_t sum = 0;
                if (r >= n || j < lo / 4 * 4 || j >= (hi + 3) / 4 * 4) {
                    if (out[r][j] == out[r][j]) FAIL("keys: %d bits, slot %ld was written", bits, (long)j);
                    continue;
                }
                for (int64_t i = 0; i < dim; i++) {
                    const uint8_t *key = keys + j * row;
                    int code = bits == 8 ? key[i] : read16(key + 2 * (i % quarter)) >> (4 * (i / quarter)) & 15;
                    sum += (2 * code - (int)(codec.lowest + (1 << bits) - 1)) * (int64_t)multiples[r][i];
                }
                float wanted = (float)sum * (((const kv_multiples *)(queries + r * ldq))->scale / 2);
                if (out[r][j] != wanted)
                    FAIL("keys: %d bits, dim %ld, %d queries: [%d, %ld] is %a, not %a", bits, (long)dim, n, r, (long)j, out[r][j], wanted);
            }
    }
    free(queries);
}

/* ---- float32 ------------------------------------------------------------------------------------------------------------ */

static void check_format(int format) {
    int64_t elements = FORMATS[format].elements, k = elements == 1 ? 77 : 2 * elements, rows = 11, sizes[] = {1, 3, 8, 13, 21};
    int64_t row_bytes = k / elements * FORMATS[format].size, ids[] = {10, 0, 5};
    static float decoded[2][3 * MOST_K], values[11 * MOST_K], x[21 * MOST_K], y[2][21 * 11];
    kv_weight w = {random_blocks(format, rows * k / elements), rows, row_bytes, FORMATS[format].id, 0};
    kernels_neon.rows(&w, ids, 3, k, 1.0f, decoded[0]);
    kernels_base.rows(&w, ids, 3, k, 1.0f, decoded[1]);
    for (int64_t i = 0; i < 3 * k; i++)
        if (!same(decoded[0][i], decoded[1][i])) FAIL("format %ld: element %ld", (long)FORMATS[format].id, (long)i);
    for (int64_t i = 0; i < rows; i++) kernels_base.rows(&w, &i, 1, k, 1.0f, values + i * k);
    fill(x, 21 * k);
    for (int s = 0; s < 5; s++) {
        kernels_neon.matmul(&w, 1, x, sizes[s], k, k, y[0], rows, 0);
        kernels_base.matmul(&w, 1, x, sizes[s], k, k, y[1], rows, 0);
        for (int64_t i = 0; i < sizes[s] * rows; i++) {
            double size = 0;
            for (int64_t j = 0; j < k; j++) size += fabs((double)values[i % rows * k + j] * x[i / rows * k + j]);
            if (!(fabs((double)y[0][i] - y[1][i]) <= 3e-6 * size))
                FAIL("format %ld, %ld rows: %g, not %g", (long)FORMATS[format].id, (long)sizes[s], y[0][i], y[1][i]);
        }
    }
}

static void check_pointwise(void) {
    enum { N = 3, D = 71 };
    float x[2][N * 2 * D], out[2][N * 2 * D], weight[2 * D], angles[2][N * D];
    const kernels *two[] = {&kernels_neon, &kernels_base};
    fill(weight, 2 * D), fill(angles[0], N * D), fill(angles[1], N * D);
#define BOTH(what, most, n, call) \
    fill(x[0], N * 2 * D), memcpy(x[1], x[0], sizeof x[0]); \
    for (int i = 0; i < 2; i++) two[i]->call; \
    expect_near(what, out[0], out[1], n, most); \
    expect_near(what, x[0], x[1], N * 2 * D, most)
    memset(out, 0, sizeof out);
    for (int64_t act = SILU; act <= CLAMPED; act++)
        for (int64_t gated = 0; gated < 2; gated++) {
            BOTH("activate", 2e-5f, N * D, activate(x[i], N, D, act, gated, out[i]));
        }
    BOTH("norm", 2e-6f, N * D, norm(x[i], D, weight, NULL, 0, 1e-5f, N, D, out[i], D));
    BOTH("centred norm", 2e-6f, N * D, norm(x[i], D, weight, weight, 1, 1e-5f, N, D, out[i], D));
    BOTH("rope", 2e-6f, 0, rope(x[i], 64, N, 1, 64, 50, angles[0], angles[1]));
    BOTH("rotate", 2e-6f, 0, rotate(x[i], 128, N, 2, 64));
    BOTH("rotate in blocks of 2", 2e-6f, 0, rotate(x[i], 128, N, 2, 50));
#undef BOTH
}

/* ---- attention ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    kv_codec codec;
} named_codec;

static const named_codec F16_CODEC = {"f16", {16, 10, 1, 0, 0, 65504.0}};
static const named_codec CACHED[] = {
    {"f32", {32, 23, 1, 0, 0, 3e38}}, {"f16", {16, 10, 1, 0, 0, 65504.0}}, {"bf16", {16, 7, 1, 0, 0, 3e38}},
    {"fp8", {8, 3, 1, 0, 0, 448.0}}, {"fp8_e5m2", {8, 2, 1, 0, 0, 57344.0}}, {"int8", {8, 0, 1, 1, 1, 0.0}},
    {"int6", {6, 0, 4, 0, 15, 0.0}}, {"int5", {5, 0, 8, 0, 15, 0.0}}, {"int4", {4, 0, 4, 0, 15, 0.0}},
};

enum { KV_HEADS = 2, HEADS = 6, TOKENS = 150, MOST_DIM = 128, MOST_PAGES = 24 };

typedef struct {
    kv_paged kv;
    kv_entry entries[MOST_PAGES];
    int64_t closed[MOST_PAGES], open[MOST_PAGES];
    uint8_t *memory;
    size_t bytes;
} cache;

static kv_record record_of(const kv_codec *codec, int64_t slots, int64_t dim_k, int64_t dim_v) {
    int64_t sealed = codec->bits < 16, scales = sealed && !codec->mantissa;
    int64_t k_row = (dim_k + 7) / 8 * 8 * codec->bits / 8, v_row = (dim_v + 7) / 8 * 8 * codec->bits / 8;
    kv_record r = {0, k_row, v_row, slots * k_row, 0, 0, *codec, *codec};
    r.k_scales = scales ? slots * (k_row + v_row) : 0, r.v_scales = scales ? r.k_scales + 2 * slots : 0;
    r.bytes = slots * (k_row + v_row) + (scales ? 4 * slots : 0) + 32;
    return r;
}

/* A poisoned cache with the rows of k and v, sealed up to the last whole page but one; mean: what keys lack. */
static void build(cache *c, const kv_codec *codec, int64_t slots, int64_t dim_k, int64_t dim_v, const float *k, const float *v,
                  const float *mean, const float *angles) {
    static const float ones[KV_HEADS] = {1.5f, 0.75f};
    int64_t pages = (TOKENS + slots - 1) / slots, sealed = codec->bits < 16 ? TOKENS / slots - 1 : pages;
    kv_record closed = record_of(codec, slots, dim_k, dim_v), open = record_of(&F16_CODEC.codec, slots, dim_k, dim_v);
    memset(c, 0, sizeof *c);
    c->bytes = (size_t)(pages * KV_HEADS * (closed.bytes + open.bytes));
    c->memory = guarded(c->bytes);
    memset(c->memory, 0xff, c->bytes);
    for (int64_t p = 0; p < pages; p++) {
        c->closed[p] = (int64_t)(intptr_t)c->memory + p * KV_HEADS * (closed.bytes + open.bytes);
        c->open[p] = c->closed[p] + KV_HEADS * closed.bytes;
        int64_t hi = TOKENS - p * slots < slots ? TOKENS - p * slots : slots, is_open = p >= sealed;
        c->entries[p] = (kv_entry){is_open ? c->open[p] : c->closed[p], p * slots, 0, hi, 0, INT64_MAX, 0, is_open, p, 0};
    }
    c->kv = (kv_paged){.entries = c->entries, .n_entries = pages, .sealed = codec->bits < 16, .closed = {c->closed, 0, closed},
                       .open = {c->open, 0, open}, .page_size = slots, .kv_heads = KV_HEADS, .dim_k = dim_k, .dim_v = dim_v};
    if (codec->mantissa && codec->bits == 8) c->kv.static_k = c->kv.static_v = ones;
    if (codec->bits < 16 && !codec->mantissa) /* as keys are centred */
        c->kv.centre = mean, c->kv.cos = angles, c->kv.sin = angles + TOKENS, c->kv.rope_half = dim_k / 4;
    kv_part part = {&c->kv, 0, TOKENS, 0, NULL, 0, 0, 0};
    kv_store(k, KV_HEADS * dim_k, v, KV_HEADS * dim_v, &part, 1);
    if (codec->bits < 16) kv_seal(&c->kv, 0, sealed * slots);
}

static void check_attention(const char *isa, const named_codec *type, int64_t slots, int64_t dim_k, int64_t dim_v) {
    static float k[TOKENS * KV_HEADS * MOST_DIM], v[TOKENS * KV_HEADS * MOST_DIM], q[TOKENS * HEADS * MOST_DIM];
    static float out[3][TOKENS * HEADS * MOST_DIM], mean[KV_HEADS * MOST_DIM], angles[8 * TOKENS * MOST_DIM];
    const float sinks[HEADS] = {0.5f, -1, 2, 0, 1, -3};
    cache c[2];
    fill(k, TOKENS * KV_HEADS * dim_k), fill(v, TOKENS * KV_HEADS * dim_v), fill(q, TOKENS * HEADS * dim_k);
    fill(mean, KV_HEADS * dim_k), fill(angles, 8 * TOKENS * MOST_DIM);
    for (int i = 0; i < 2; i++) kv_init(1, i ? "base" : isa), build(c + i, &type->codec, slots, dim_k, dim_v, k, v, mean, angles);
    for (size_t i = 0; i < c[0].bytes; i++) /* stored and sealed alike */
        if (c[0].memory[i] != c[1].memory[i]) FAIL("%s: byte %ld of the cache is %d, not %d", type->name, (long)i, c[0].memory[i], c[1].memory[i]);
    for (int64_t start = 0; start < TOKENS; start = start ? start * 3 : 11)
        for (int64_t rows = 1; rows <= 27 && start + rows <= TOKENS; rows += 13)
            for (int64_t window = 0; window < 40; window += 23) {
                for (int i = 0; i < 3; i++) { /* the last one with --exact */
                    kv_init(1, i == 1 ? "base" : isa);
                    cache *of = c + (i == 1);
                    of->kv.exact = i == 2;
                    kv_part part = {&of->kv, 0, rows, start, NULL, 0, 0, 0};
                    kv_attention(q + start * HEADS * dim_k, HEADS * dim_k, NULL, 0, HEADS, window, 0.1f, 0, sinks, &part, 1, out[i]);
                    of->kv.exact = 0;
                }
                expect_near(type->name, out[0], out[1], rows * HEADS * dim_v, type->codec.bits < 16 ? 5e-4f : 1e-5f);
                expect_near(type->name, out[2], out[1], rows * HEADS * dim_v, 1e-5f);
            }
}

int main(void) {
    static int8_t tables[N_GRIDS][2048 * 8];
    const int8_t *given[N_GRIDS];
    const char *isas[] = {"neoni8mm", "neondot", "neon"};
    for (int g = 0; g < N_GRIDS; g++) fill_bytes((uint8_t *)tables[g], sizeof tables[g]), given[g] = tables[g];
    kv_grids(given);
    printf("%s\n", kv_init(1, ""));
    for (int i = 0; i < 3; i++) {
        if (!kv_init(1, isas[i])) continue;
        for (size_t f = 0; f < sizeof INTERLEAVED_FORMATS / sizeof *INTERLEAVED_FORMATS; f++) check_fixed(INTERLEAVED_FORMATS + f);
        for (int64_t dim = 32; int_keys && dim <= 512; dim *= 2)
            for (int bits = 4; bits <= 8; bits += 4) check_keys(bits, dim, 0, 24), check_keys(bits, dim, 5, 18);
        for (size_t t = 0; t < sizeof CACHED / sizeof *CACHED; t++) {
            check_attention(isas[i], CACHED + t, 16, 64, 64);
            check_attention(isas[i], CACHED + t, 32, 96, 72);
            check_attention(isas[i], CACHED + t, 64, 72, 40);
        }
        printf("%s\n", isas[i]);
    }
    for (int f = 0; f < (int)(sizeof FORMATS / sizeof *FORMATS); f++) check_format(f);
    check_pointwise();
    return 0;
}
