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

/* ---- 32 codes of a block, from column 32 * part on -------------------------------------------------------------------- */

static inline void nibble_codes(const uint8_t *q, uint8_t *out) {
    for (int i = 0; i < 16; i++) out[i] = q[i] & 15, out[i + 16] = q[i] >> 4;
}

static inline void fifth_bits(const uint8_t *field, uint8_t *out) {
    for (int i = 0; i < 32; i++) out[i] |= (uint8_t)((field[i / 8] >> i % 8 & 1) << 4);
}

static inline void codes_q4_0(const uint8_t *b, int part, uint8_t *out) { (void)part, nibble_codes(b + 2, out); }

static inline void codes_q4_1(const uint8_t *b, int part, uint8_t *out) { (void)part, nibble_codes(b + 4, out); }

static inline void codes_q5_0(const uint8_t *b, int part, uint8_t *out) {
    (void)part, nibble_codes(b + 6, out), fifth_bits(b + 2, out);
}

static inline void codes_q5_1(const uint8_t *b, int part, uint8_t *out) {
    (void)part, nibble_codes(b + 8, out), fifth_bits(b + 4, out);
}

static inline void codes_q8_0(const uint8_t *b, int part, uint8_t *out) {
    (void)part;
    for (int i = 0; i < 32; i++) out[i] = b[2 + i] ^ 0x80;
}

static inline void codes_q4_k(const uint8_t *b, int part, uint8_t *out) {
    const uint8_t *q = b + 16 + 32 * (part / 2);
    for (int i = 0; i < 32; i++) out[i] = q[i] >> (part % 2 * 4) & 15;
}

static inline void codes_q5_k(const uint8_t *b, int part, uint8_t *out) {
    const uint8_t *q = b + 48 + 32 * (part / 2);
    for (int i = 0; i < 32; i++) out[i] = (uint8_t)((q[i] >> (part % 2 * 4) & 15) | (b[16 + i] >> part & 1) << 4);
}

static inline void codes_q6_k(const uint8_t *b, int part, uint8_t *out) {
    const uint8_t *l = b + 64 * (part / 4) + 32 * (part % 2), *h = b + 128 + 32 * (part / 4);
    for (int i = 0; i < 32; i++)
        out[i] = (uint8_t)((l[i] >> (part % 4 / 2 * 4) & 15) | (h[i] >> (2 * (part % 4)) & 3) << 4);
}

/* Where a block has what goes to the head of an interleaved one: the numbers of two bytes, and those of one. */
static inline int halves_at(int64_t format) { return format == 14 ? 208 : 0; }

static inline int bytes_at(int64_t format) { return format == 14 ? 192 : 4; }

/* ---- from blocks to interleaved ones ---------------------------------------------------------------------------------- */

/* codes [16 rows][32 columns] -> 64 * bits bytes. */
static inline void pack_codes(const uint8_t *codes, int bits, uint8_t *out) {
    uint8_t fours[8][64];
    for (int r = 0; r < GROUP; r++)
        for (int j = 0; j < 8; j++) memcpy(fours[j] + 4 * r, codes + 32 * r + 4 * j, 4);
    if (bits == 8) {
        memcpy(out, fours, sizeof fours);
        return;
    }
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 64; i++) out[64 * j + i] = (uint8_t)((fours[j][i] & 15) | fours[j + 4][i] << 4);
    if (bits == 5)
        for (int i = 0; i < 64; i++) {
            int high = 0;
            for (int j = 0; j < 8; j++) high |= (fours[j][i] >> 4) << j;
            out[256 + i] = (uint8_t)high;
        }
    if (bits == 6)
        for (int side = 0; side < 2; side++)
            for (int i = 0; i < 64; i++) {
                int high = 0;
                for (int j = 0; j < 4; j++) high |= (fours[4 * side + j][i] >> 4) << 2 * j;
                out[256 + 64 * side + i] = (uint8_t)high;
            }
}

#define INTERLEAVE(upper, lower, id, elements, size, bits, offset, halves, bytes, sixteens)                                     \
    static void interleave_##lower(const uint8_t *first, int64_t rows, int64_t row_bytes, int64_t blocks, uint8_t *out) {       \
        for (int64_t b = 0; b < blocks; b++, out += GROUP * size) {                                                             \
            uint8_t codes[GROUP * 32];                                                                                          \
            for (int r = 0; r < GROUP; r++) {                                                                                   \
                static const uint8_t zeros[size];                                                                               \
                const uint8_t *block = r < rows ? first + r * row_bytes + b * size : zeros;                                     \
                for (int i = 0; i < halves; i++) memcpy(out + 2 * (GROUP * i + r), block + halves_at(id) + 2 * i, 2);           \
                for (int i = 0; i < bytes; i++) out[2 * GROUP * halves + GROUP * i + r] = block[bytes_at(id) + i];              \
            }                                                                                                                   \
            for (int part = 0; part < elements / 32; part++) {                                                                  \
                for (int r = 0; r < GROUP; r++) {                                                                               \
                    if (r < rows) codes_##lower(first + r * row_bytes + b * size, part, codes + 32 * r);                        \
                    else memset(codes + 32 * r, offset, 32);                                                                    \
                }                                                                                                               \
                pack_codes(codes, bits, out + GROUP * (2 * halves + bytes) + part * 64 * bits);                                 \
            }                                                                                                                   \
        }                                                                                                                       \
    }
INTERLEAVED(INTERLEAVE)
#undef INTERLEAVE

typedef struct {
    const kv_weight *w;
    int64_t blocks;
    uint8_t *out;
    void (*interleave)(const uint8_t *, int64_t, int64_t, int64_t, uint8_t *);
} interleave_args;

static void interleave_task(void *arg, int64_t group, int thread) {
    const interleave_args *a = arg;
    const kv_weight *w = a->w;
    (void)thread;
    a->interleave(w->blocks + group * GROUP * w->row_bytes, w->rows - group * GROUP, w->row_bytes, a->blocks,
                  a->out + group * GROUP * w->row_bytes);
}

/* Interleave all rows of a matrix of `k` columns into whole groups. */
void kv_interleave(const kv_weight *w, int64_t k, uint8_t *out) {
    interleave_args a = {w, 0, out, NULL};
    switch (w->format) {
#define CASE(upper, lower, id, elements, size, bits, offset, halves, bytes, sixteens) \
    case id: a.blocks = k / elements, a.interleave = interleave_##lower; break;
        INTERLEAVED(CASE)
#undef CASE
    }
    parallel((w->rows + GROUP - 1) / GROUP, interleave_task, &a);
}
