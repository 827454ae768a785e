/* Products of queries with keys of 8-bit and 4-bit codes, in integers. Included by cpu.c once for each instruction set that
 * has the instruction for it, with NAME(x) and LANES (32-bit lanes of a vector) defined.
 *
 * Queries are whole multiples of a scale, 128 * high + low (cpu_attention.h), so that products with codes are exact, in any
 * order. Keys are folded first: [slots / LANES][dim / 4][LANES slots][4 codes], so that a lane adds up one key. */

#define CHUNK (4 * LANES) /* codes of a key that are folded together */
#if LANES == 16
#define vi __m512i
#define VECTOR(name) _mm512_##name
#define LOADV(p) _mm512_loadu_si512(p)
#define STOREV(p, v) _mm512_storeu_si512(p, v)
#define ZERO _mm512_setzero_si512()
#define DPBUSD(acc, codes, query) _mm512_dpbusd_epi32(acc, codes, query)
#else
#define vi __m256i
#define VECTOR(name) _mm256_##name
#define LOADV(p) _mm256_loadu_si256((const __m256i *)(p))
#define STOREV(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define ZERO _mm256_setzero_si256()
#define DPBUSD(acc, codes, query) _mm256_dpbusd_avx_epi32(acc, codes, query)
#endif

/* CHUNK codes of a row; of 4 bits, the low halves of the bytes stand before the high ones. */
static inline __attribute__((always_inline)) vi NAME(chunk)(const uint8_t *b, int64_t chunk, int bits) {
    if (bits == 8) return LOADV(b + chunk * CHUNK);
#if LANES == 16
    __m256i bytes = _mm256_loadu_si256((const __m256i *)(b + chunk * CHUNK / 2)), low = _mm256_set1_epi8(15);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(bytes, low)),
                              _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low), 1);
#else
    __m128i bytes = _mm_loadu_si128((const __m128i *)(b + chunk * CHUNK / 2)), low = _mm_set1_epi8(15);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_and_si128(bytes, low)),
                                   _mm_and_si128(_mm_srli_epi16(bytes, 4), low), 1);
#endif
}

/* Slots [lo, hi) and their neighbours, in whole vectors; a page has a multiple of LANES slots. */
static inline __attribute__((always_inline)) void NAME(fold_any)(const uint8_t *b, int64_t pitch, int64_t lo, int64_t hi, int64_t dim, int bits, uint8_t *out) {
    for (int64_t j = lo / LANES * LANES; j < hi; j += LANES)
        for (int64_t c = 0; c < dim / CHUNK; c++) {
            uint8_t *to = out + j * dim + c * CHUNK * LANES;
            vi row[LANES], t[LANES], u[LANES];
            for (int i = 0; i < LANES; i++) row[i] = NAME(chunk)(b + (j + i) * pitch, c, bits);
            for (int i = 0; i < LANES; i += 2) {
                t[i] = VECTOR(unpacklo_epi32)(row[i], row[i + 1]);
                t[i + 1] = VECTOR(unpackhi_epi32)(row[i], row[i + 1]);
            }
            for (int i = 0; i < LANES; i += 4) /* u[i + k]: columns k of each quarter of a vector, of rows i .. i + 3 */
                for (int k = 0; k < 2; k++) {
                    u[i + 2 * k] = VECTOR(unpacklo_epi64)(t[i + k], t[i + k + 2]);
                    u[i + 2 * k + 1] = VECTOR(unpackhi_epi64)(t[i + k], t[i + k + 2]);
                }
            for (int k = 0; k < 4; k++) {
#if LANES == 16
                vi a = _mm512_shuffle_i32x4(u[k], u[4 + k], 0x88), e = _mm512_shuffle_i32x4(u[8 + k], u[12 + k], 0x88);
                STOREV(to + k * 64, _mm512_shuffle_i32x4(a, e, 0x88));
                STOREV(to + (k + 8) * 64, _mm512_shuffle_i32x4(a, e, 0xdd));
                a = _mm512_shuffle_i32x4(u[k], u[4 + k], 0xdd), e = _mm512_shuffle_i32x4(u[8 + k], u[12 + k], 0xdd);
                STOREV(to + (k + 4) * 64, _mm512_shuffle_i32x4(a, e, 0x88));
                STOREV(to + (k + 12) * 64, _mm512_shuffle_i32x4(a, e, 0xdd));
#else
                STOREV(to + k * 32, _mm256_permute2x128_si256(u[k], u[4 + k], 0x20));
                STOREV(to + (k + 4) * 32, _mm256_permute2x128_si256(u[k], u[4 + k], 0x31));
#endif
            }
        }
}

static void NAME(fold)(const uint8_t *b, int64_t pitch, int64_t lo, int64_t hi, int64_t dim, int64_t bits, uint8_t *out) {
    if (bits == 8) NAME(fold_any)(b, pitch, lo, hi, dim, 8, out);
    else NAME(fold_any)(b, pitch, lo, hi, dim, 4, out);
}

/* out[r, j] = scale of query r * (codes of slot j . its multiples - less / 2). Queries are `ldq` bytes apart. */
static inline __attribute__((always_inline)) void NAME(dots_any)(const uint8_t *folded, int64_t lo, int64_t hi, int64_t dim, const kv_multiples *queries,
                                int64_t ldq, int n, float *out, int64_t ld_out) {
    for (int64_t j = lo / LANES * LANES; j < hi; j += LANES) {
        vi high[KEYS_QUERIES][2], low[KEYS_QUERIES][2]; /* of even and of odd dims: a sum is a long chain */
        for (int r = 0; r < n; r++) high[r][0] = high[r][1] = low[r][0] = low[r][1] = ZERO;
        for (int64_t c = 0; c < dim / 4; c += 2)
            for (int i = 0; i < 2; i++) {
                vi codes = LOADV(folded + (j * dim / 4 + (c + i) * LANES) * 4);
                for (int r = 0; r < n; r++) {
                    const int32_t *q = AT(queries, r * ldq)->parts + 2 * (c + i);
                    high[r][i] = DPBUSD(high[r][i], codes, VECTOR(set1_epi32)(q[0]));
                    low[r][i] = DPBUSD(low[r][i], codes, VECTOR(set1_epi32)(q[1]));
                }
            }
        for (int r = 0; r < n; r++) {
            const kv_multiples *q = AT(queries, r * ldq);
            vi sum = VECTOR(slli_epi32)(VECTOR(add_epi32)(high[r][0], high[r][1]), 7);
            sum = VECTOR(add_epi32)(sum, VECTOR(add_epi32)(low[r][0], low[r][1]));
            sum = VECTOR(sub_epi32)(VECTOR(add_epi32)(sum, sum), VECTOR(set1_epi32)(q->less));
            VECTOR(storeu_ps)(out + r * ld_out + j, VECTOR(mul_ps)(VECTOR(cvtepi32_ps)(sum), VECTOR(set1_ps)(q->scale / 2)));
        }
    }
}

static void NAME(dots)(const uint8_t *folded, int64_t pitch, int64_t lo, int64_t hi, int64_t dim, int64_t bits,
                       const kv_multiples *queries, int64_t ldq, int n, float *out, int64_t ld_out) {
    (void)pitch, (void)bits; /* folded keys are alike */
    switch (n) {
    case 1: NAME(dots_any)(folded, lo, hi, dim, queries, ldq, 1, out, ld_out); break;
    case 2: NAME(dots_any)(folded, lo, hi, dim, queries, ldq, 2, out, ld_out); break;
    case 3: NAME(dots_any)(folded, lo, hi, dim, queries, ldq, 3, out, ld_out); break;
    default: NAME(dots_any)(folded, lo, hi, dim, queries, ldq, 4, out, ld_out); break;
    }
}

static const kv_keys NAME(keys) = {LANES, 4, 0, NAME(fold), NAME(dots)};

#undef CHUNK
#undef vi
#undef VECTOR
#undef LOADV
#undef STOREV
#undef DPBUSD
#undef ZERO
