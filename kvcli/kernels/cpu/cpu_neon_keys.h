/* Products of queries with keys of 8-bit and 4-bit codes, in integers, for NEON. Included by cpu.c with NAME(x) and MATRIX
 * (whether matrices of 2 by 8 bytes are multiplied) defined; cpu_keys.h is the same for x86.
 *
 * Keys are read as they are: with four lanes, sums of lanes are less work than to fold keys. A query has EACH high bytes, then
 * the low ones, of as many dims. Four keys are looked at together. */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#if MATRIX
#define EACH 8
#define QUERIES 4 /* at a time, whose sums have room in registers */
#define TAKEN 0   /* off codes of 8 bits: here bytes of codes have no sign */
#else
#define EACH 16
#define QUERIES 2
#define TAKEN 128
#endif

/* 32 codes of a key; of 4 bits, the low halves of the bytes stand before the high ones. */
INLINE void NAME(key_codes)(const uint8_t *key, int64_t at, int bits, uint8x16_t *out) {
    if (bits == 8) {
        out[0] = vld1q_u8(key + at), out[1] = vld1q_u8(key + at + 16);
#if TAKEN
        out[0] = veorq_u8(out[0], vdupq_n_u8(TAKEN)), out[1] = veorq_u8(out[1], vdupq_n_u8(TAKEN));
#endif
    } else {
        uint8x16_t bytes = vld1q_u8(key + at / 2);
        out[0] = vandq_u8(bytes, vdupq_n_u8(15)), out[1] = vshrq_n_u8(bytes, 4);
    }
}

/* out[r] = the products of n queries with four keys, `pitch` bytes apart, each 128 * high + low. */
INLINE void NAME(four_keys)(const uint8_t *keys, int64_t pitch, int64_t dim, int bits, const kv_multiples *queries, int64_t ldq, int n,
                            int32x4_t *out) {
    int32x4_t acc[QUERIES][4][2];
    UNROLL for (int r = 0; r < n; r++)
        UNROLL for (int k = 0; k < 4; k++) acc[r][k][0] = acc[r][k][1] = vdupq_n_s32(0);
    for (int64_t at = 0; at < dim; at += 32) {
        uint8x16_t codes[4][2];
        UNROLL for (int k = 0; k < 4; k++) NAME(key_codes)(keys + k * pitch, at, bits, codes[k]);
        UNROLL for (int r = 0; r < n; r++) {
            const int8_t *q = (const int8_t *)AT(queries, r * ldq)->parts + 2 * at;
#if MATRIX /* acc: of two keys, of the high and the low bytes each; of dims 0 to 7 and 8 to 15 of 16 */
            UNROLL for (int k = 0; k < 4; k += 2)
                UNROLL for (int i = 0; i < 2; i++) {
                    uint64x2_t a = vreinterpretq_u64_u8(codes[k][i]), b = vreinterpretq_u64_u8(codes[k + 1][i]);
                    int32x4_t *sums = acc[r][k];
                    sums[0] = vusmmlaq_s32(sums[0], vreinterpretq_u8_u64(vzip1q_u64(a, b)), vld1q_s8(q + 32 * i));
                    sums[1] = vusmmlaq_s32(sums[1], vreinterpretq_u8_u64(vzip2q_u64(a, b)), vld1q_s8(q + 32 * i + 16));
                }
#else /* acc: of one key, of the high bytes, of the low ones */
            UNROLL for (int i = 0; i < 2; i++) {
                int8x16_t high = vld1q_s8(q + 32 * i), low = vld1q_s8(q + 32 * i + 16);
                UNROLL for (int k = 0; k < 4; k++) {
                    acc[r][k][0] = vdotq_s32(acc[r][k][0], vreinterpretq_s8_u8(codes[k][i]), high);
                    acc[r][k][1] = vdotq_s32(acc[r][k][1], vreinterpretq_s8_u8(codes[k][i]), low);
                }
            }
#endif
        }
    }
    UNROLL for (int r = 0; r < n; r++) {
        int32x4_t sum[4];
#if MATRIX
        const int32x4_t places = {7, 0, 7, 0};
        UNROLL for (int k = 0; k < 4; k += 2) sum[k / 2] = vshlq_s32(vaddq_s32(acc[r][k][0], acc[r][k][1]), places);
        out[r] = vpaddq_s32(sum[0], sum[1]);
#else
        UNROLL for (int k = 0; k < 4; k++) sum[k] = vaddq_s32(vshlq_n_s32(acc[r][k][0], 7), acc[r][k][1]);
        out[r] = vpaddq_s32(vpaddq_s32(sum[0], sum[1]), vpaddq_s32(sum[2], sum[3]));
#endif
    }
}

/* out[r, j] = scale of query r * (codes of slot j . its multiples - less / 2), for slots [lo, hi) and their neighbours, in whole
 * vectors. Queries are `ldq` bytes apart. */
INLINE void NAME(dots_any)(const uint8_t *keys, int64_t pitch, int64_t lo, int64_t hi, int64_t dim, int bits,
                           const kv_multiples *queries, int64_t ldq, int n, float *out, int64_t ld_out) {
    for (int64_t j = lo / 4 * 4; j < hi; j += 4) {
        int32x4_t sums[QUERIES];
        NAME(four_keys)(keys + j * pitch, pitch, dim, bits, queries, ldq, n, sums);
        for (int r = 0; r < n; r++) {
            const kv_multiples *q = AT(queries, r * ldq);
            int32x4_t twice = vsubq_s32(vshlq_n_s32(sums[r], 1), vdupq_n_s32(q->less));
            vst1q_f32(out + r * ld_out + j, vmulq_n_f32(vcvtq_f32_s32(twice), q->scale / 2));
        }
    }
}

#define DOTS(n) \
    if (bits == 8) NAME(dots_any)(keys, pitch, lo, hi, dim, 8, queries, ldq, n, out, ld_out); \
    else NAME(dots_any)(keys, pitch, lo, hi, dim, 4, queries, ldq, n, out, ld_out)

static void NAME(dots)(const uint8_t *keys, int64_t pitch, int64_t lo, int64_t hi, int64_t dim, int64_t bits,
                       const kv_multiples *queries, int64_t ldq, int n, float *out, int64_t ld_out) {
    for (; n > QUERIES; n -= QUERIES, queries = AT(queries, QUERIES * ldq), out += QUERIES * ld_out) { DOTS(QUERIES); }
    switch (n) {
    case 1: DOTS(1); break;
#if QUERIES > 2
    case 3: DOTS(3); break;
    case 4: DOTS(4); break;
#endif
    default: DOTS(2); break;
    }
}

static const kv_keys NAME(keys) = {8, EACH, TAKEN, NULL, NAME(dots)};

#undef INLINE
#undef UNROLL
#undef EACH
#undef QUERIES
#undef TAKEN
#undef DOTS
