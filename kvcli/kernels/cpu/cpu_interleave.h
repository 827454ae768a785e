/* Interleaved weights: 16 rows of a matrix side by side, in as many bytes as the rows have in their file. Included by cpu.c.
 *
 * The blocks of 16 rows (of zeros behind the last one) become one: first what stands at the head of a block, a number of all
 * 16 rows after the other, in the order of the file; then the codes, 32 columns after the other. Codes are unsigned, with
 * the same number added to all where the format has signed ones. Four columns of 16 rows are 64 bytes, a column's rows 4
 * bytes apart, as instructions that add up four products want them. Of the 8 times 64 bytes of 32 columns
 *  - the low halves of those with codes below 16 are the first four, the high halves the last four;
 *  - fifth bits follow: bit j of 64 bytes belongs to the j-th of the eight;
 *  - fifth and sixth bits, likewise: bits 2j and 2j + 1 of 64 bytes to the j-th of the first four, then those of the last;
 *  - codes of 8 bits are whole bytes. */

#define GROUP 16 /* rows */

/* F(name, name in functions, id, elements and bytes of a block, bits of a code, what is added to it, numbers of two bytes and
 * of one at the head, whether scales are of 16 columns). */
#define INTERLEAVED(F) \
    F(Q4_0, q4_0, 2, 32, 18, 4, 8, 1, 0, 0) F(Q4_1, q4_1, 3, 32, 20, 4, 0, 2, 0, 0) \
    F(Q5_0, q5_0, 6, 32, 22, 5, 16, 1, 0, 0) F(Q5_1, q5_1, 7, 32, 24, 5, 0, 2, 0, 0) \
    F(Q8_0, q8_0, 8, 32, 34, 8, 128, 1, 0, 0) F(Q4_K, q4_k, 12, 256, 144, 4, 0, 2, 12, 0) \
    F(Q5_K, q5_k, 13, 256, 176, 5, 0, 2, 12, 0) F(Q6_K, q6_k, 14, 256, 210, 6, 32, 1, 16, 1)

/* ---- 32 columns of four rows -------------------------------------------------------------------------------------------
 *
 * put_NAME writes their codes from column 32 * part of blocks on, four columns at a time, 64 bytes apart. In a vector stand
 * the same four columns of each row. */

typedef uint32_t kv_fours __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (kv_fours){__VA_ARGS__})
#endif

static inline void put(uint8_t *out, int place, kv_fours codes) { memcpy(out + 64 * place, &codes, sizeof codes); }

/* 16 columns, a byte each, from `at` on in the blocks of four rows. */
static inline void columns(const uint8_t *const *b, int at, kv_fours *out) {
    kv_fours rows[4], low[2], high[2];
    for (int r = 0; r < 4; r++) memcpy(rows + r, b[r] + at, sizeof *rows);
    for (int i = 0; i < 2; i++) {
        low[i] = SHUFFLED(rows[2 * i], rows[2 * i + 1], 0, 4, 1, 5);
        high[i] = SHUFFLED(rows[2 * i], rows[2 * i + 1], 2, 6, 3, 7);
    }
    out[0] = SHUFFLED(low[0], low[1], 0, 1, 4, 5), out[1] = SHUFFLED(low[0], low[1], 2, 3, 6, 7);
    out[2] = SHUFFLED(high[0], high[1], 0, 1, 4, 5), out[3] = SHUFFLED(high[0], high[1], 2, 3, 6, 7);
}

/* Codes of 4 bits as they stand in blocks of 32: column i in the low half of a byte, i + 16 in the high one. */
static inline void put_halves(const uint8_t *const *b, int at, uint8_t *out) {
    kv_fours both[4];
    columns(b, at, both);
    for (int j = 0; j < 4; j++) put(out, j, both[j]);
}

/* Codes of 4 bits of 32 columns in the halves of bytes, which are `shift` bits from their lower end. */
static inline void put_low_bits(const uint8_t *const *b, int at, int shift, uint8_t *out) {
    kv_fours first[4], last[4];
    columns(b, at, first), columns(b, at + 16, last);
    for (int j = 0; j < 4; j++) put(out, j, (first[j] >> shift & 0x0f0f0f0f) | (last[j] >> shift & 0x0f0f0f0f) << 4);
}

#define EXCHANGE(x, apart, which) /* bits of x with those that are further up */ \
    do {                                                                         \
        kv_fours differ = (x ^ x >> (apart)) & (which);                          \
        x ^= differ ^ differ << (apart);                                         \
    } while (0)

/* The fifth bits in blocks of 32: bit i is column i's. Bit 4j + i becomes bit j of byte i: three of five bits of its number
 * change places with the other two. */
static inline void put_fifth_bits(const uint8_t *const *b, int at, uint8_t *out) {
    kv_fours x = {read32(b[0] + at), read32(b[1] + at), read32(b[2] + at), read32(b[3] + at)};
    EXCHANGE(x, 14, 0x0000cccc);
    EXCHANGE(x, 7, 0x00aa00aa);
    EXCHANGE(x, 2, 0x0c0c0c0c);
    EXCHANGE(x, 1, 0x22222222);
    put(out, 4, x);
}

static inline void put_q4_0(const uint8_t *const *b, int part, uint8_t *out) { (void)part, put_halves(b, 2, out); }

static inline void put_q4_1(const uint8_t *const *b, int part, uint8_t *out) { (void)part, put_halves(b, 4, out); }

static inline void put_q5_0(const uint8_t *const *b, int part, uint8_t *out) {
    (void)part, put_halves(b, 6, out), put_fifth_bits(b, 2, out);
}

static inline void put_q5_1(const uint8_t *const *b, int part, uint8_t *out) {
    (void)part, put_halves(b, 8, out), put_fifth_bits(b, 4, out);
}

static inline void put_q8_0(const uint8_t *const *b, int part, uint8_t *out) {
    kv_fours x[8];
    (void)part, columns(b, 2, x), columns(b, 18, x + 4);
    for (int j = 0; j < 8; j++) put(out, j, x[j] ^ 0x80808080);
}

static inline void put_q4_k(const uint8_t *const *b, int part, uint8_t *out) {
    put_low_bits(b, 16 + 32 * (part / 2), part % 2 * 4, out);
}

static inline void put_q5_k(const uint8_t *const *b, int part, uint8_t *out) {
    kv_fours x[8], high = {0};
    columns(b, 16, x), columns(b, 32, x + 4);
    for (int j = 0; j < 8; j++) high |= (x[j] >> part & 0x01010101) << j;
    put_low_bits(b, 48 + 32 * (part / 2), part % 2 * 4, out), put(out, 4, high);
}

static inline void put_q6_k(const uint8_t *const *b, int part, uint8_t *out) {
    put_low_bits(b, 64 * (part / 4) + 32 * (part % 2), part % 4 / 2 * 4, out);
    for (int side = 0; side < 2; side++) {
        kv_fours x[4], high = {0};
        columns(b, 128 + 32 * (part / 4) + 16 * side, x);
        for (int j = 0; j < 4; j++) high |= (x[j] >> 2 * (part % 4) & 0x03030303) << 2 * j;
        put(out, 4 + side, high);
    }
}

/* Where a block has what goes to the head of an interleaved one: the numbers of two bytes, and those of one. */
static inline int halves_at(int64_t format) { return format == 14 ? 208 : 0; }

static inline int bytes_at(int64_t format) { return format == 14 ? 192 : 4; }

/* ---- from blocks to interleaved ones ---------------------------------------------------------------------------------- */

#define INTERLEAVE(upper, lower, id, elements, size, bits, offset, halves, bytes, sixteens)                                     \
    static void interleave_##lower(const uint8_t *first, int64_t rows, int64_t row_bytes, int64_t blocks, uint8_t *out) {       \
        static const uint8_t zeros[size];                                                                                       \
        for (int64_t b = 0; b < blocks; b++, out += GROUP * size) {                                                             \
            const uint8_t *block[GROUP];                                                                                        \
            for (int r = 0; r < GROUP; r++) {                                                                                   \
                block[r] = r < rows ? first + r * row_bytes + b * size : zeros;                                                 \
                for (int i = 0; i < halves; i++) memcpy(out + 2 * (GROUP * i + r), block[r] + halves_at(id) + 2 * i, 2);        \
                for (int i = 0; i < bytes; i++) out[2 * GROUP * halves + GROUP * i + r] = block[r][bytes_at(id) + i];           \
            }                                                                                                                   \
            for (int r = 0; r < GROUP; r += 4)                                                                                  \
                _Pragma("GCC unroll 8") for (int part = 0; part < elements / 32; part++)                                        \
                    put_##lower(block + r, part, out + GROUP * (2 * halves + bytes) + part * 64 * bits + 4 * r);                \
        }                                                                                                                       \
    }
INTERLEAVED(INTERLEAVE)
#undef INTERLEAVE
#undef EXCHANGE
#undef SHUFFLED

typedef void (*interleave_fn)(const uint8_t *, int64_t, int64_t, int64_t, uint8_t *);

static interleave_fn interleave_of(int64_t format, int64_t *elements) {
    switch (format) {
#define CASE(upper, lower, id, number, size, bits, offset, halves, bytes, sixteens) \
    case id: *elements = number; return interleave_##lower;
        INTERLEAVED(CASE)
#undef CASE
    }
    abort(); /* no other format is asked for */
}

/* Rows of group `group` of a matrix of `k` columns, whose blocks are at `source`, side by side. */
static void interleave_group(const kv_weight *w, const uint8_t *source, int64_t k, int64_t group, uint8_t *out) {
    int64_t elements;
    interleave_fn interleave = interleave_of(w->format, &elements);
    interleave(source + group * GROUP * w->row_bytes, w->rows - group * GROUP, w->row_bytes, k / elements, out);
}

static int64_t groups_of(const kv_weight *w) { return (w->rows + GROUP - 1) / GROUP; }

/* ---- fresh memory, and memory of a file that is read no more ------------------------------------------------------------ */

#define PIECE (2 << 20) /* what the system maps and clears at once, where it can */

/* Have memory mapped. */
static void touch(uint8_t *memory, int64_t bytes) {
    for (volatile uint8_t *at = memory; at < memory + bytes; at += PIECE) *at = *at;
}

static void touch_task(void *arg, int64_t task, int thread) { (void)thread, touch((uint8_t *)arg + task * PIECE, 1); }

/* The same by all threads, each piece by one: two that write into the same one would both clear it. */
static void touch_all(uint8_t *memory, int64_t bytes) {
    parallel_that((bytes + PIECE - 1) / PIECE, touch_task, memory, 0);
}

/* Give back the whole pages in memory that is mapped from a file; what is read again comes from the file. */
static void give_back(const uint8_t *memory, int64_t bytes) {
#ifdef MADV_DONTNEED
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) / page * page;
    if (first < end) madvise((void *)first, end - first, MADV_DONTNEED);
#else
    (void)memory, (void)bytes;
#endif
}

/* ---- whole matrices ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const kv_weight *w;
    int64_t k, groups_per_task;
    uint8_t *out;
} interleave_args;

static void interleave_task(void *arg, int64_t task, int thread) {
    const interleave_args *a = arg;
    int64_t first = task * a->groups_per_task, end = first + a->groups_per_task, groups = groups_of(a->w);
    (void)thread;
    for (int64_t group = first; group < end && group < groups; group++)
        interleave_group(a->w, a->w->blocks, a->k, group, a->out + group * GROUP * a->w->row_bytes);
}

/* Interleave all rows of a matrix of `k` columns into whole groups. `mapped`: its blocks are a file's, and are read no more. */
void kv_interleave(const kv_weight *w, int64_t k, uint8_t *out, int64_t mapped) {
    int64_t group_bytes = GROUP * w->row_bytes, groups = groups_of(w), each = PIECE / group_bytes;
    if (each > (groups + pool.tuner.limit - 1) / pool.tuner.limit) each = (groups + pool.tuner.limit - 1) / pool.tuner.limit;
    interleave_args a = {w, k, each < 1 ? 1 : each, out};
    touch_all(out, groups * group_bytes);
    parallel_that((groups + a.groups_per_task - 1) / a.groups_per_task, interleave_task, &a, 0);
    if (mapped) give_back(w->blocks, w->rows * w->row_bytes);
}

/* ---- matrices that are interleaved when they are used -------------------------------------------------------------------
 *
 * The first use of one interleaves each group of its rows where it is multiplied and keeps nothing; the next use keeps what it
 * makes. Products are the same, bit by bit. So the first token does not wait for fresh memory, and experts that are never
 * chosen, or once in a long prompt, take none. */

/* What has begun to be kept is whole when a call that found it so has ended: until then each group is made by whoever needs it,
 * the same one again by another call. Calls take turns (cpu_pool.h), so that nobody reads what is being written. */
enum { UNUSED, USED, KEEPING, KEPT };

/* Whether there are interleaved rows that need not be made. */
static int is_kept(const kv_weight *w) { return !w->later || atomic_load(&w->later->state) == KEPT; }

/* Several uses follow each other: the first one keeps what it makes. */
static void expect_uses(const kv_weight *w, int64_t n) {
    for (int64_t i = 0, state; i < n; i++)
        if (state = UNUSED, w[i].later) atomic_compare_exchange_strong(&w[i].later->state, &state, USED);
}

/* A use of a matrix begins; returns what its state is now. */
static int64_t begin_use(const kv_weight *w) {
    int64_t state = UNUSED;
    if (!w->later) return KEPT;
    if (atomic_compare_exchange_strong(&w->later->state, &state, USED)) return USED;
    if (state == USED) atomic_compare_exchange_strong(&w->later->state, &state, KEEPING);
    return state == KEPT ? KEPT : KEEPING;
}

/* It ends; `state`: what `begin_use` returned. */
static void end_use(const kv_weight *w, int64_t state) {
    if (state == KEPT) return;
    if (state == KEEPING) atomic_store(&w->later->state, KEPT);
    give_back(w->later->source, w->rows * w->row_bytes);
}

/* Of matrices that are multiplied together: what `begin_use` returns; NULL = all are kept. */
static int64_t *begin_uses(const kv_weight *w, int64_t n) {
    int64_t i = 0, *states;
    while (i < n && is_kept(w + i)) i++;
    if (i == n) return NULL;
    states = malloc((size_t)n * sizeof *states);
    if (!states) abort();
    for (i = 0; i < n; i++)
        if ((states[i] = begin_use(w + i)) == KEEPING) touch_all((uint8_t *)w[i].blocks, groups_of(w + i) * GROUP * w[i].row_bytes);
    return states;
}

static void end_uses(const kv_weight *w, int64_t n, int64_t *states) {
    for (int64_t i = 0; i < n; i++) end_use(w + i, states[i]);
    free(states);
}

/* A group of interleaved rows of a matrix of `k` columns; `room` is for one that is not kept. */
static const uint8_t *interleaved_group(const kv_weight *w, int64_t k, int64_t group, uint8_t *room) {
    uint8_t *there = (uint8_t *)w->blocks + group * GROUP * w->row_bytes;
    int64_t state = w->later ? atomic_load(&w->later->state) : KEPT;
    if (state == KEPT) return there;
    if (state != KEEPING) there = room;
    interleave_group(w, w->later->source, k, group, there);
    return there;
}

/* Groups were made by a task, `last` and those before it, of up to `most` in all. Of large matrices the file's memory is given
 * back meanwhile. */
static void read_groups(const kv_weight *w, int64_t last, int64_t most) {
    int64_t first = last + 1 > most ? last + 1 - most : 0, end = (last + 1) * GROUP < w->rows ? (last + 1) * GROUP : w->rows;
    int64_t bytes = (end - first * GROUP) * w->row_bytes;
    if (bytes >= PIECE / 2 && !is_kept(w)) give_back(w->later->source + first * GROUP * w->row_bytes, bytes);
}

/* The matrix as its rows are in the file. */
static kv_weight source_of(const kv_weight *w) {
    kv_weight source = *w;
    source.blocks = w->later->source, source.interleaved = 0, source.later = NULL;
    return source;
}

/* Make and keep all of a matrix of `k` columns. */
void kv_keep(const kv_weight *w, int64_t k) {
    if (is_kept(w)) return;
    kv_weight source = source_of(w);
    kv_interleave(&source, k, (uint8_t *)w->blocks, 1);
    atomic_store(&w->later->state, KEPT);
}
