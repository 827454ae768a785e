/* Cached rows read as attention wants them: codes of a row as floats, dot products with queries, weighted sums of rows.
 * Included by cpu_body.h.
 *
 * A code is an element before its scale: the number itself (16 and 32 bits), an 8-bit float up to FP8_FACTOR, or a code on
 * the grid, whose middle is not taken off. Dims are read four vectors at a time, one of each quarter of the row, because
 * that is how the narrow grids are packed; sums over dims have that order for every type, so a row that was decoded into
 * floats before gives the same bits as one that is read in its packed form. */

#define QUERY_ROWS (REGISTERS == 32 ? 4 : 2) /* queries whose sums have room in registers */

/* VL 16-bit numbers as 32-bit integers. */
INLINE vi NAME(u16)(const uint8_t *p) {
#if VL == 16 && defined(__AVX512F__)
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#elif NEON
    return (vi)vmovl_u16(vreinterpret_u16_u8(vld1_u8(p)));
#else
    vi v;
    for (int i = 0; i < VL; i++) v[i] = read16(p + 2 * i);
    return v;
#endif
}

/* Four-bit numbers from bit `at` of each lane on, as floats. */
INLINE vf NAME(nibble)(vi word, int at) {
#if VL == 16 && defined(__AVX512F__)
    const vf value = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)_mm512_permutexvar_ps((__m512i)(word >> at), (__m512)value); /* looks at the lowest four bits alone */
#else
    return FLOATS(word >> at & 15);
#endif
}

/* Bytes as the high bytes of halves, shifted right by `shift` below the sign: e5m2 (0) is a half, e4m3 (1) is 2^-8 of one. */
INLINE vf NAME(load_fp8)(const uint8_t *p, int shift) {
#if VL == 16 && defined(__AVX512F__)
    __m256i b = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8);
    __m256i rest = _mm256_srli_epi16(_mm256_slli_epi16(b, 1), 1 + shift), sign = _mm256_set1_epi16((short)0x8000);
    return (vf)_mm512_cvtph_ps(_mm256_or_si256(_mm256_and_si256(b, sign), rest));
#elif VL == 8 && defined(__AVX2__)
    __m128i b = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p)), 8);
    __m128i rest = _mm_srli_epi16(_mm_slli_epi16(b, 1), 1 + shift), sign = _mm_set1_epi16((short)0x8000);
    return (vf)_mm256_cvtph_ps(_mm_or_si128(_mm_and_si128(b, sign), rest));
#elif NEON
    uint16x4_t b = vget_low_u16(vshll_n_u8(vcreate_u8(read32(p)), 8)), rest = (b << 1) >> (1 + shift);
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vbsl_u16(vdup_n_u16(0x8000), b, rest)));
#else
    uint16_t h[VL];
    for (int i = 0; i < VL; i++) h[i] = (uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << (8 - shift));
    return NAME(load_f16)((const uint8_t *)h);
#endif
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

/* From each cache type codes_X: codes [j, j + VL) of each quarter of a packed row. */
#define PLAIN_CODES(name, size, load)                                                                      \
    INLINE void NAME(codes_##name)(const uint8_t *b, int64_t quarter, int64_t j, vf *out) {                \
        UNROLL for (int p = 0; p < 4; p++) out[p] = load(b + size * (p * quarter + j));                    \
    }
#define LOAD_F32(p) LOAD(p)
#define LOAD_INT8(p) FLOATS(NAME(u8)(p))
#define LOAD_E4M3(p) NAME(load_fp8)(p, 1)
#define LOAD_E5M2(p) NAME(load_fp8)(p, 0)
PLAIN_CODES(f32, 4, LOAD_F32)
PLAIN_CODES(f16, 2, NAME(load_f16))
PLAIN_CODES(bf16, 2, NAME(load_bf16))
PLAIN_CODES(e4m3, 1, LOAD_E4M3)
PLAIN_CODES(e5m2, 1, LOAD_E5M2)
PLAIN_CODES(int8, 1, LOAD_INT8)

INLINE void NAME(codes_int4)(const uint8_t *b, int64_t quarter, int64_t j, vf *out) {
    vi word = NAME(u16)(b + 2 * j);
    (void)quarter;
    UNROLL for (int p = 0; p < 4; p++) out[p] = NAME(nibble)(word, 4 * p);
}

INLINE void NAME(codes_int5)(const uint8_t *b, int64_t quarter, int64_t j, vf *out) {
    vi word = NAME(u16)(b + 2 * j), above = NAME(nibble_fields)(b + 2 * quarter, quarter / 2, j);
    UNROLL for (int p = 0; p < 4; p++) out[p] = FLOATS((word >> (4 * p) & 15) | (above >> p & 1) << 4);
}

INLINE void NAME(codes_int6)(const uint8_t *b, int64_t quarter, int64_t j, vf *out) {
    vi word = NAME(u16)(b + 2 * j), above = NAME(u8)(b + 2 * quarter + j);
    UNROLL for (int p = 0; p < 4; p++) out[p] = FLOATS((word >> (4 * p) & 15) | (above >> (2 * p) & 3) << 4);
}

/* Element i of a packed row as its code. */
INLINE float NAME(code_at)(const uint8_t *b, const kv_codec *codec, int64_t quarter, int64_t i) {
    switch (CODEC(codec->bits, codec->mantissa)) {
    case CODEC(32, 23): return bits_f32(read32(b + 4 * i));
    case CODEC(16, 10): return HALF(b + 2 * i);
    case CODEC(16, 7): return bits_f32((uint32_t)read16(b + 2 * i) << 16);
    case CODEC(8, 3): return NAME(half)((uint16_t)((b[i] & 0x80) << 8 | (b[i] & 0x7f) << 7));
    case CODEC(8, 2): return NAME(half)((uint16_t)(b[i] << 8));
    case CODEC(8, 0): return (float)b[i];
    }
    int64_t j = i % quarter, part = i / quarter, half = quarter / 2;
    int code = read16(b + 2 * j) >> (4 * part) & 15;
    if (codec->bits == 6) code |= (b[2 * quarter + j] >> (2 * part) & 3) << 4;
    if (codec->bits == 5) code |= (b[2 * quarter + j % half] >> (part + j / half * 4) & 1) << 4;
    return (float)code;
}

/* Where a row of n elements has its next quarter, in elements, padding included. */
INLINE int64_t NAME(fields)(const kv_codec *codec, int64_t n) {
    int64_t quarter = (n + codec->packing - 1) / codec->packing * codec->packing / 4;
    return quarter ? quarter : 1;
}

INLINE float NAME(middle)(const kv_codec *codec) { /* of the grid of codes; 0 where they are numbers */
    return codec->mantissa ? 0.0f : (float)(codec->lowest + (INT64_C(1) << codec->bits) - 1) / 2;
}

#define FP8_FACTOR(codec) ((codec)->bits == 8 && (codec)->mantissa == 3 ? 256.0f : 1.0f)

INLINE int64_t NAME(within)(int64_t j, int64_t lo, int64_t hi) { return j < lo ? lo : j < hi ? j : hi - 1; }

/* Slots lo .. hi - 1 of a page, whose rows stand `pitch` bytes apart from `b` on; `quarter` elements are VL or a multiple.
 *
 * dots: the products of `queries` queries, `ldq` apart, with the keys, out[r, j], for whole vectors of slots; those outside
 * are somewhat. mix: acc[r] = acc[r] * old[r] + start[r] + the sum of w[r, j] times the value of slot j; acc is [r, lda].
 * rows: n elements of each of the slots, into floats `lda` apart, in any number. */
typedef void (*NAME(dots_fn))(const uint8_t *b, int64_t pitch, int64_t lo, int64_t hi, int64_t quarter, const float *q,
                              int64_t ldq, float *out, int64_t ld_out);
typedef void (*NAME(mix_fn))(const uint8_t *b, int64_t pitch, int64_t lo, int64_t hi, int64_t quarter, const float *w,
                             int64_t ldw, const float *old, const float *start, float *acc, int64_t lda);
typedef void (*NAME(rows_fn))(const uint8_t *b, int64_t pitch, int64_t lo, int64_t hi, const kv_codec *codec, int64_t n,
                              float *out, int64_t lda);

#define READER(name, queries)                                                                                            \
    static void NAME(dots##queries##_##name)(const uint8_t *b, int64_t pitch, int64_t lo, int64_t hi, int64_t quarter,   \
                                             const float *q, int64_t ldq, float *out, int64_t ld_out) {                  \
        for (int64_t j = lo / VL * VL; j < hi; j += VL) {                                                                \
            vf sums[queries][VL];                                                                                        \
            for (int i = 0; i < VL; i += 2) {                                                                            \
                const uint8_t *first = b + NAME(within)(j + i, lo, hi) * pitch;                                          \
                const uint8_t *second = b + NAME(within)(j + i + 1, lo, hi) * pitch;                                     \
                vf acc[queries][2] = {0};                                                                                \
                for (int64_t d = 0; d < quarter; d += VL) {                                                              \
                    vf key[2][4];                                                                                        \
                    NAME(codes_##name)(first, quarter, d, key[0]);                                                       \
                    NAME(codes_##name)(second, quarter, d, key[1]);                                                      \
                    UNROLL for (int p = 0; p < 4; p++)                                                                   \
                        UNROLL for (int r = 0; r < queries; r++) {                                                       \
                            vf x = LOAD(q + r * ldq + p * quarter + d);                                                  \
                            acc[r][0] = FMA(x, key[0][p], acc[r][0]);                                                    \
                            acc[r][1] = FMA(x, key[1][p], acc[r][1]);                                                    \
                        }                                                                                                \
                }                                                                                                        \
                UNROLL for (int r = 0; r < queries; r++) sums[r][i] = acc[r][0], sums[r][i + 1] = acc[r][1];             \
            }                                                                                                            \
            for (int r = 0; r < queries; r++) STORE(out + r * ld_out + j, NAME(hsums)(sums[r]));                         \
        }                                                                                                                \
    }                                                                                                                    \
    static void NAME(mix##queries##_##name)(const uint8_t *b, int64_t pitch, int64_t lo, int64_t hi, int64_t quarter,    \
                                            const float *w, int64_t ldw, const float *old, const float *start,           \
                                            float *acc, int64_t lda) {                                                   \
        for (int64_t d = 0; d < quarter; d += VL) {                                                                      \
            vf o[queries][4];                                                                                            \
            UNROLL for (int r = 0; r < queries; r++)                                                                     \
                UNROLL for (int p = 0; p < 4; p++) o[r][p] = LOAD(acc + r * lda + p * quarter + d) * old[r] + start[r];  \
            for (int64_t j = lo; j < hi; j++) {                                                                          \
                vf value[4];                                                                                             \
                NAME(codes_##name)(b + j * pitch, quarter, d, value);                                                    \
                UNROLL for (int r = 0; r < queries; r++) {                                                               \
                    vf x = SPLAT(w[r * ldw + j]);                                                                        \
                    UNROLL for (int p = 0; p < 4; p++) o[r][p] = FMA(x, value[p], o[r][p]);                              \
                }                                                                                                        \
            }                                                                                                            \
            UNROLL for (int r = 0; r < queries; r++)                                                                     \
                UNROLL for (int p = 0; p < 4; p++) STORE(acc + r * lda + p * quarter + d, o[r][p]);                      \
        }                                                                                                                \
    }

#define ROWS(name)                                                                                                       \
    static void NAME(rows_##name)(const uint8_t *b, int64_t pitch, int64_t lo, int64_t hi, const kv_codec *codec,        \
                                  int64_t n, float *out, int64_t lda) {                                                  \
        int64_t quarter = NAME(fields)(codec, n), whole = 4 * quarter == n ? quarter / VL * VL : 0;                      \
        for (int64_t s = lo; s < hi; s++) {                                                                              \
            const uint8_t *row = b + s * pitch;                                                                          \
            float *to = out + s * lda;                                                                                   \
            for (int64_t j = 0; j < whole; j += VL) {                                                                    \
                vf code[4];                                                                                              \
                NAME(codes_##name)(row, quarter, j, code);                                                               \
                UNROLL for (int p = 0; p < 4; p++) STORE(to + p * quarter + j, code[p]);                                 \
            }                                                                                                            \
            for (int64_t j = whole; j < quarter; j++)                                                                    \
                for (int64_t i = j; i < n; i += quarter) to[i] = NAME(code_at)(row, codec, quarter, i);                  \
        }                                                                                                                \
    }

typedef struct {
    NAME(rows_fn) rows;
    NAME(dots_fn) dots[QUERY_ROWS]; /* by the number of queries, less one */
    NAME(mix_fn) mix[QUERY_ROWS];
} NAME(reader);

#if VL == 16 || NEON
#define READERS(name) \
    ROWS(name) READER(name, 1) READER(name, 2) READER(name, 3) READER(name, 4) \
    static const NAME(reader) NAME(read_##name) = { \
        NAME(rows_##name), \
        {NAME(dots1_##name), NAME(dots2_##name), NAME(dots3_##name), NAME(dots4_##name)}, \
        {NAME(mix1_##name), NAME(mix2_##name), NAME(mix3_##name), NAME(mix4_##name)}};
#else
#define READERS(name) \
    ROWS(name) READER(name, 1) READER(name, 2) \
    static const NAME(reader) NAME(read_##name) = { \
        NAME(rows_##name), {NAME(dots1_##name), NAME(dots2_##name)}, {NAME(mix1_##name), NAME(mix2_##name)}};
#endif

READERS(f32)
READERS(f16)
READERS(bf16)
READERS(e4m3)
READERS(e5m2)
READERS(int8)
READERS(int6)
READERS(int5)
READERS(int4)

/* What reads rows of that cache type, NULL if nothing does. */
static const NAME(reader) *NAME(reader_of)(const kv_codec *codec) {
    switch (CODEC(codec->bits, codec->mantissa)) {
    case CODEC(32, 23): return &NAME(read_f32);
    case CODEC(16, 10): return &NAME(read_f16);
    case CODEC(16, 7): return &NAME(read_bf16);
    case CODEC(8, 3): return &NAME(read_e4m3);
    case CODEC(8, 2): return &NAME(read_e5m2);
    case CODEC(8, 0): return &NAME(read_int8);
    case CODEC(6, 0): return &NAME(read_int6);
    case CODEC(5, 0): return &NAME(read_int5);
    case CODEC(4, 0): return &NAME(read_int4);
    default: return NULL;
    }
}

static int NAME(has_codec)(const kv_codec *codec) { return NAME(reader_of)(codec) != NULL; }
