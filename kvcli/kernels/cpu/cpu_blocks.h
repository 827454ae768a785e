/* Block formats for one instruction set: part_X decodes 32 weights of a block to float32, in the order of operations of
 * kernels/reference (ggml.py, lookup.py), which describe the formats. Included by cpu_body.h. */

#define VECTORS (32 / VL) /* vectors in a part of 32 weights */

/* VL bytes as 32-bit integers. */
INLINE vi NAME(u8)(const uint8_t *p) {
#if VL == 16 && defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif NEON
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(read32(p)))));
#else
    vi v;
    for (int i = 0; i < VL; i++) v[i] = p[i];
    return v;
#endif
}

INLINE vi NAME(s8)(const uint8_t *p) {
#if VL == 16 && defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#elif NEON
    return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(read32(p)))));
#else
    return NAME(u8)(p) << 24 >> 24;
#endif
}

/* Sixteen bytes as 32 four-bit numbers (low halves first): scale * (number - offset), or scale * number + offset. */
#if VL == 16 && defined(__AVX512F__)
INLINE void NAME(nibbles)(const uint8_t *q, vf table, vf *out) { /* table: the value of each number */
    vi index = NAME(u8)(q);
    out[0] = (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
    out[1] = (vf)_mm512_permutexvar_ps((__m512i)(index >> 4), (__m512)table);
}
#define NIBBLES(q, out, expression) do { \
        vf n = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; \
        NAME(nibbles)(q, expression, out); \
    } while (0)
#elif NEON
INLINE void NAME(of_bytes)(int8x16_t bytes, vf *out) { /* 16 bytes with a sign as floats */
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    out[0] = FLOATS((vi)vmovl_s16(vget_low_s16(low))), out[1] = FLOATS((vi)vmovl_high_s16(low));
    out[2] = FLOATS((vi)vmovl_s16(vget_low_s16(high))), out[3] = FLOATS((vi)vmovl_high_s16(high));
}
INLINE void NAME(nibbles)(const uint8_t *q, vf *out) {
    uint8x16_t bytes = vld1q_u8(q);
    NAME(of_bytes)(vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))), out);
    NAME(of_bytes)(vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4)), out + 4);
}
#define NIBBLES(q, out, expression) do { \
        vf numbers[8]; \
        NAME(nibbles)(q, numbers); \
        for (int j = 0; j < 8; j++) { \
            vf n = numbers[j]; \
            out[j] = expression; \
        } \
    } while (0)
#else
#define NIBBLES(q, out, expression) do { \
        for (int j = 0; j < 32 / VL; j++) { \
            vi bytes = NAME(u8)((q) + j * VL % 16); \
            vf n = FLOATS(bytes >> (j * VL / 16 * 4) & 15); \
            out[j] = expression; \
        } \
    } while (0)
#endif

/* VL half or bfloat16 numbers. */
INLINE vf NAME(load_f16)(const uint8_t *p) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VL == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif NEON
    return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
#else
    vf v;
    for (int i = 0; i < VL; i++) v[i] = HALF(p + 2 * i);
    return v;
#endif
}

INLINE vf NAME(load_bf16)(const uint8_t *p) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)((vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)) << 16);
#elif VL == 8 && defined(__AVX2__)
    return (vf)((vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)) << 16);
#elif NEON
    return (vf)vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16);
#else
    vf v;
    for (int i = 0; i < VL; i++) v[i] = bits_f32((uint32_t)read16(p + 2 * i) << 16);
    return v;
#endif
}

/* 32 plain numbers; `load` takes VL of them from p. */
#define PLAIN(name, size, load) \
    INLINE void NAME(part_##name)(const uint8_t *b, int part, vf *out) { \
        (void)part; \
        for (int j = 0; j < VECTORS; j++) { \
            const uint8_t *p = b + size * j * VL; \
            out[j] = load; \
        } \
    }
PLAIN(f32, 4, LOAD(p))
PLAIN(f16, 2, NAME(load_f16)(p))
PLAIN(bf16, 2, NAME(load_bf16)(p))
PLAIN(i8, 1, FLOATS(NAME(s8)(p)))
#undef PLAIN

/* The same for types that are rounded to float32, a number at a time. */
#define CONVERTED(name, type) \
    INLINE void NAME(part_##name)(const uint8_t *b, int part, vf *out) { \
        type in[32]; \
        float rounded[32]; \
        (void)part; \
        memcpy(in, b, sizeof in); \
        for (int i = 0; i < 32; i++) rounded[i] = (float)in[i]; \
        memcpy(out, rounded, sizeof rounded); \
    }
CONVERTED(i16, int16_t)
CONVERTED(i32, int32_t)
CONVERTED(i64, int64_t)
CONVERTED(f64, double)
#undef CONVERTED

INLINE void NAME(part_q4_0)(const uint8_t *b, int part, vf *out) {
    vf d = SPLAT(HALF(b));
    (void)part;
    NIBBLES(b + 2, out, (n - 8.0f) * d);
}

INLINE void NAME(part_q4_1)(const uint8_t *b, int part, vf *out) {
    (void)part;
#if VL == 16 && defined(__AVX512F__)
    int32_t pair;
    memcpy(&pair, b, 4);
    __m512 dm = _mm512_cvtph_ps(_mm256_set1_epi32(pair)); /* d, m, d, m, ... */
    vf d = (vf)_mm512_moveldup_ps(dm), m = (vf)_mm512_movehdup_ps(dm);
#else
    vf d = SPLAT(HALF(b)), m = SPLAT(HALF(b + 2));
#endif
    NIBBLES(b + 4, out, n * d + m);
}

/* 0 or 16 from bit `from + lane` of a 32-bit field. */
INLINE vf NAME(fifth)(const uint8_t *field, int from) {
    int32_t bits;
    vi lane;
    memcpy(&bits, field, 4);
    for (int i = 0; i < VL; i++) lane[i] = from + i;
    return FLOATS((((vi){0} + bits) >> lane & 1) << 4);
}

INLINE void NAME(part_q5_0)(const uint8_t *b, int part, vf *out) {
    vf d = SPLAT(HALF(b));
    (void)part;
    NIBBLES(b + 6, out, n);
    for (int j = 0; j < VECTORS; j++) out[j] = (out[j] + NAME(fifth)(b + 2, j * VL) - 16.0f) * d;
}

INLINE void NAME(part_q5_1)(const uint8_t *b, int part, vf *out) {
    vf d = SPLAT(HALF(b)), m = SPLAT(HALF(b + 2));
    (void)part;
    NIBBLES(b + 8, out, n);
    for (int j = 0; j < VECTORS; j++) out[j] = (out[j] + NAME(fifth)(b + 4, j * VL)) * d + m;
}

INLINE void NAME(part_q8_0)(const uint8_t *b, int part, vf *out) {
    vf d = SPLAT(HALF(b));
    (void)part;
    for (int j = 0; j < VECTORS; j++) out[j] = FLOATS(NAME(s8)(b + 2 + j * VL)) * d;
}

/* Groups of 16 in a part of 32: side 0 is the first half of the vectors, side 1 the second. */
#if VL == 16
#define EACH_SIDE(side, j) for (int side = 0; side < 2; side++) for (int j = side * VECTORS / 2; j < (side + 1) * VECTORS / 2; j++)
#else /* left to itself the compiler does not unroll four vectors, and shifts and signs by lane are no constants then */
#define EACH_SIDE(side, j) \
    UNROLL for (int side = 0; side < 2; side++) \
        UNROLL for (int j = side * VECTORS / 2; j < (side + 1) * VECTORS / 2; j++)
#endif

INLINE void NAME(part_q2_k)(const uint8_t *b, int part, vf *out) {
    float d = HALF(b + 80), dmin = HALF(b + 82);
    const uint8_t *q = b + 16 + 32 * (part / 4);
    EACH_SIDE(side, j) {
        int scales = b[2 * part + side];
        vf scale = SPLAT(d * (float)(scales & 15)), min = SPLAT(dmin * (float)(scales >> 4));
        out[j] = scale * FLOATS(NAME(u8)(q + j * VL) >> (part % 4 * 2) & 3) - min;
    }
}

INLINE void NAME(part_q3_k)(const uint8_t *b, int part, vf *out) {
    const uint8_t *s = b + 96, *q = b + 32 + 32 * (part / 4);
    float d = HALF(b + 108);
    EACH_SIDE(side, j) {
        int g = 2 * part + side, low = g < 8 ? s[g] & 15 : s[g - 8] >> 4, high = s[8 + g % 4] >> (2 * (g / 4)) & 3;
        vf scale = SPLAT(d * (float)((low | high << 4) - 32));
        vi bit = NAME(u8)(b + j * VL) >> part & 1;
        out[j] = scale * FLOATS((NAME(u8)(q + j * VL) >> (part % 4 * 2) & 3) + (bit << 2) - 4);
    }
}

/* 6-bit scale and min number j of the 12 packed bytes of Q4_K and Q5_K. */
INLINE void NAME(scale_min)(const uint8_t *s, int j, float *scale, float *min) {
    if (j < 4) {
        *scale = (float)(s[j] & 63), *min = (float)(s[j + 4] & 63);
    } else {
        *scale = (float)((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
        *min = (float)((s[j + 4] >> 4) | (s[j] >> 6) << 4);
    }
}

INLINE void NAME(part_q4_k)(const uint8_t *b, int part, vf *out) {
    float sc, mn;
    NAME(scale_min)(b + 4, part, &sc, &mn);
    vf scale = SPLAT(HALF(b) * sc), min = SPLAT(HALF(b + 2) * mn);
    const uint8_t *q = b + 16 + 32 * (part / 2);
    for (int j = 0; j < VECTORS; j++) out[j] = scale * FLOATS(NAME(u8)(q + j * VL) >> (part % 2 * 4) & 15) - min;
}

INLINE void NAME(part_q5_k)(const uint8_t *b, int part, vf *out) {
    float sc, mn;
    NAME(scale_min)(b + 4, part, &sc, &mn);
    vf scale = SPLAT(HALF(b) * sc), min = SPLAT(HALF(b + 2) * mn);
    const uint8_t *q = b + 48 + 32 * (part / 2);
    for (int j = 0; j < VECTORS; j++) {
        vi bit = (NAME(u8)(b + 16 + j * VL) >> part & 1) << 4;
        out[j] = scale * FLOATS((NAME(u8)(q + j * VL) >> (part % 2 * 4) & 15) | bit) - min;
    }
}

INLINE void NAME(part_q6_k)(const uint8_t *b, int part, vf *out) {
    float d = HALF(b + 208);
    int half = part / 4, quarter = part % 4;
    const uint8_t *l = b + 64 * half + 32 * (quarter % 2), *h = b + 128 + 32 * half;
    EACH_SIDE(side, j) {
        vf scale = SPLAT(d * (float)(int8_t)b[192 + 2 * part + side]);
        vi low = NAME(u8)(l + j * VL) >> (quarter / 2 * 4) & 15, high = NAME(u8)(h + j * VL) >> (2 * quarter) & 3;
        out[j] = scale * FLOATS((low | high << 4) - 32);
    }
}

/* ---- signs, and codes that are looked up ---------------------------------------------------------------------- */

/* v with the sign turned where bit `from + lane` of `signs` is set. */
INLINE vf NAME(turned)(vf v, uint32_t signs, int from) {
#if VL == 16 && defined(__AVX512F__)
    __m512 sign = _mm512_set1_ps(-0.0f);
    return (vf)_mm512_mask_xor_ps((__m512)v, (__mmask16)(signs >> from), (__m512)v, sign);
#else
    vi lane;
    for (int i = 0; i < VL; i++) lane[i] = 31 - from - i;
    return (vf)((vi)v ^ (((vi){0} + (int32_t)signs) << lane & INT32_MIN));
#endif
}

/* Vector j of 32 weights that are four entries of 8, or eight of 4. */
INLINE vf NAME(eights)(const int8_t *const *entry, int j) {
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(
        _mm_set_epi64x((long long)read64(entry[2 * j + 1]), (long long)read64(entry[2 * j]))));
#else
    return FLOATS(NAME(s8)((const uint8_t *)entry[j * VL / 8] + j * VL % 8));
#endif
}

INLINE vf NAME(fours)(const int8_t *const *entry, int j) {
#if VL == 16 && defined(__AVX512F__)
    const int8_t *const *e = entry + 4 * j;
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(
        _mm_set_epi32((int)read32(e[3]), (int)read32(e[2]), (int)read32(e[1]), (int)read32(e[0]))));
#elif VL == 8 && defined(__AVX2__)
    const int8_t *const *e = entry + 2 * j;
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set_epi32(0, 0, (int)read32(e[1]), (int)read32(e[0]))));
#else
    return FLOATS(NAME(s8)((const uint8_t *)entry[j]));
#endif
}

/* Sixteen bytes of four-bit numbers, each one of 16 values: those of the low halves, then of the high ones; `runs` of 8
 * bytes have a turn each. */
INLINE void NAME(of_16)(const uint8_t *q, const int8_t *values, int runs_of_8, vf *out) {
#if VL >= 8 && defined(__SSSE3__)
    __m128i bytes = _mm_loadu_si128((const __m128i *)q), table = _mm_loadu_si128((const __m128i *)values);
    __m128i low = _mm_shuffle_epi8(table, _mm_and_si128(bytes, _mm_set1_epi8(15)));
    __m128i high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15)));
    __m128i first = runs_of_8 ? _mm_unpacklo_epi64(low, high) : low, second = runs_of_8 ? _mm_unpackhi_epi64(low, high) : high;
#if VL == 16
    out[0] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first));
    out[1] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second));
#else
    out[0] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(first));
    out[1] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(first, first)));
    out[2] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(second));
    out[3] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(second, second)));
#endif
#elif NEON
    uint8x16_t bytes = vld1q_u8(q);
    int8x16_t table = vld1q_s8(values), low = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15))), high = vqtbl1q_s8(table, vshrq_n_u8(bytes, 4));
    NAME(of_bytes)(runs_of_8 ? vcombine_s8(vget_low_s8(low), vget_low_s8(high)) : low, out);
    NAME(of_bytes)(runs_of_8 ? vcombine_s8(vget_high_s8(low), vget_high_s8(high)) : high, out + 4);
#else
    int run = runs_of_8 ? 8 : 16;
    float v[32];
    for (int i = 0; i < 32; i++) v[i] = values[q[i / (2 * run) * run + i % run] >> (i / run % 2 * 4) & 15];
    memcpy(out, v, sizeof v);
#endif
}

/* The entries of a grid of `size` weights that `count` bytes name, with `bits` bits each of `above`. */
#define ENTRIES(entry, count, grid, size, byte, above, bits) \
    const int8_t *entry[count]; \
    for (int i = 0; i < count; i++) entry[i] = grids[grid] + size * ((byte) | ((above) >> bits * i & ((1 << bits) - 1)) << 8)

/* 32 weights with signs, the first 16 times `first`, the others times `second`. */
#define SIGNED(load, entry, signs, first, second) \
    EACH_SIDE(side, j) out[j] = NAME(turned)(NAME(load)(entry, j) * SPLAT(side ? (second) : (first)), signs, j * VL)

INLINE void NAME(part_iq2_xxs)(const uint8_t *b, int part, vf *out) {
    const uint8_t *run = b + 2 + 8 * part;
    uint32_t word = read32(run + 4), signs = even_signs(word);
    float scale = HALF(b) * (0.5f + (float)(word >> 28)) * 0.25f;
    ENTRIES(entry, 4, IQ2_XXS_GRID, 8, run[i], 0, 1);
    SIGNED(eights, entry, signs, scale, scale);
}

INLINE void NAME(part_iq2_xs)(const uint8_t *b, int part, vf *out) {
    uint64_t run = read64(b + 2 + 8 * part);
    uint32_t seven = 0;
    const int8_t *entry[4];
    for (int i = 0; i < 4; i++) {
        entry[i] = grids[IQ2_XS_GRID] + 8 * (run >> 16 * i & 511);
        seven |= (uint32_t)(run >> (16 * i + 9) & 127) << 7 * i;
    }
    uint32_t signs = even_signs(seven);
    float d = HALF(b), first = d * (0.5f + (float)(b[66 + part] & 15)) * 0.25f;
    float second = d * (0.5f + (float)(b[66 + part] >> 4)) * 0.25f;
    SIGNED(eights, entry, signs, first, second);
}

INLINE void NAME(part_iq2_s)(const uint8_t *b, int part, vf *out) {
    const uint8_t *q = b + 2 + 4 * part;
    uint32_t signs = read32(b + 34 + 4 * part);
    float d = HALF(b), first = d * (0.5f + (float)(b[74 + part] & 15)) * 0.25f;
    float second = d * (0.5f + (float)(b[74 + part] >> 4)) * 0.25f;
    ENTRIES(entry, 4, IQ2_S_GRID, 8, q[i], b[66 + part], 2);
    SIGNED(eights, entry, signs, first, second);
}

INLINE void NAME(part_iq3_xxs)(const uint8_t *b, int part, vf *out) {
    const uint8_t *q = b + 2 + 8 * part;
    uint32_t word = read32(b + 66 + 4 * part), signs = even_signs(word);
    float scale = HALF(b) * (0.5f + (float)(word >> 28)) * 0.5f;
    ENTRIES(entry, 8, IQ3_XXS_GRID, 4, q[i], 0, 1);
    SIGNED(fours, entry, signs, scale, scale);
}

INLINE void NAME(part_iq3_s)(const uint8_t *b, int part, vf *out) {
    const uint8_t *q = b + 2 + 8 * part;
    uint32_t signs = read32(b + 74 + 4 * part);
    float scale = HALF(b) * (float)(1 + 2 * (b[106 + part / 2] >> part % 2 * 4 & 15));
    ENTRIES(entry, 8, IQ3_S_GRID, 4, q[i], b[66 + part], 1);
    SIGNED(fours, entry, signs, scale, scale);
}

/* Ternary weights, plus an eighth, or minus one where bit i of `down` is set for element i. */
#define TERNARY(entry, down, first, second) \
    EACH_SIDE(side, j) \
        out[j] = (NAME(eights)(entry, j) + NAME(turned)(SPLAT(0.125f), down, j * VL)) * SPLAT(side ? (second) : (first))

INLINE void NAME(part_iq1_s)(const uint8_t *b, int part, vf *out) {
    const uint8_t *q = b + 2 + 4 * part;
    uint32_t qh = read16(b + 34 + 2 * part), down = qh & 0x8000 ? UINT32_MAX : 0;
    float scale = HALF(b) * (float)(2 * (qh >> 12 & 7) + 1);
    ENTRIES(entry, 4, IQ1_S_GRID, 8, q[i], qh, 3);
    TERNARY(entry, down, scale, scale);
}

INLINE void NAME(part_iq1_m)(const uint8_t *b, int part, vf *out) {
    const uint8_t *q = b + 4 * part;
    uint32_t qh = read16(b + 32 + 2 * part), scales = read16(b + 48 + part / 2 * 2) >> (part % 2 * 6), down = 0;
    uint16_t d16 = (uint16_t)(b[49] >> 4 | (b[51] & 0xf0) | (b[53] & 0xf0) << 4 | (b[55] & 0xf0) << 8);
    float d = NAME(half)(d16), first = d * (float)(2 * (scales & 7) + 1), second = d * (float)(2 * (scales >> 3 & 7) + 1);
    const int8_t *entry[4];
    for (int i = 0; i < 4; i++) {
        entry[i] = grids[IQ1_S_GRID] + 8 * (q[i] | (qh >> 4 * i & 7) << 8);
        down |= (qh >> (4 * i + 3) & 1) * (UINT32_C(255) << 8 * i);
    }
    TERNARY(entry, down, first, second);
}

INLINE void NAME(part_iq4_nl)(const uint8_t *b, int part, vf *out) {
    vf d = SPLAT(HALF(b));
    (void)part;
    NAME(of_16)(b + 2, NONLINEAR, 0, out);
    for (int j = 0; j < VECTORS; j++) out[j] *= d;
}

INLINE void NAME(part_iq4_xs)(const uint8_t *b, int part, vf *out) {
    int low = b[4 + part / 2] >> part % 2 * 4 & 15, high = read16(b + 2) >> 2 * part & 3;
    vf scale = SPLAT(HALF(b) * (float)((low | high << 4) - 32));
    NAME(of_16)(b + 8 + 16 * part, NONLINEAR, 0, out);
    for (int j = 0; j < VECTORS; j++) out[j] *= scale;
}

INLINE void NAME(part_mxfp4)(const uint8_t *b, int part, vf *out) {
    vf scale = SPLAT(bits_f32(b[0] < 2 ? UINT32_C(0x00200000) << b[0] : (uint32_t)(b[0] - 1) << 23));
    (void)part;
    NAME(of_16)(b + 1, DOUBLED_E2M1, 0, out);
    for (int j = 0; j < VECTORS; j++) out[j] *= scale;
}

INLINE void NAME(part_nvfp4)(const uint8_t *b, int part, vf *out) {
    NAME(of_16)(b + 4 + 16 * part, DOUBLED_E2M1, 1, out);
    EACH_SIDE(side, j) out[j] *= SPLAT(e4m3_halved(b[2 * part + side]));
}

/* ---- one or two bits, and three values ------------------------------------------------------------------------ */

INLINE void NAME(part_q1_0)(const uint8_t *b, int part, vf *out) {
    vf d = SPLAT(HALF(b));
    uint32_t unset = ~read32(b + 2 + 4 * part);
    for (int j = 0; j < VECTORS; j++) out[j] = NAME(turned)(d, unset, j * VL);
}

INLINE void NAME(part_tq1_0)(const uint8_t *b, int part, vf *out) {
    static const int32_t powers[16] = {1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
    static const int power[5] = {1, 3, 9, 27, 81};
    vf d = SPLAT(HALF(b + 52));
    EACH_SIDE(side, j) {
        vi lane, digits;
        for (int i = 0; i < VL; i++) lane[i] = i % 4 * 8;
        if (part < 5) digits = NAME(u8)(b + j * VL) * power[part];
        else if (part < 7 || side == 0) digits = NAME(u8)(b + 32 + j * VL % 16) * power[2 * part - 10 + side];
        else digits = (((vi){0} + (int32_t)read32(b + 48)) >> lane & 255) * *(const vi *)(powers + j * VL % 16);
        out[j] = d * FLOATS(((digits & 255) * 3 >> 8) - 1);
    }
}

INLINE void NAME(part_tq2_0)(const uint8_t *b, int part, vf *out) {
    vf d = SPLAT(HALF(b + 64));
    const uint8_t *q = b + 32 * (part / 4);
    for (int j = 0; j < VECTORS; j++) out[j] = d * FLOATS((NAME(u8)(q + j * VL) >> (part % 4 * 2) & 3) - 1);
}

#undef ENTRIES
#undef SIGNED
#undef TERNARY
