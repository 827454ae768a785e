/* What goes into the paged cache: rotation, storing, sealing. Included by cpu_body.h. */

/* Lane i of x goes to lane i ^ bit. */
INLINE vf NAME(swap)(vf x, int bit) {
#if VL == 16 && defined(__AVX512F__)
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)_mm512_permutexvar_ps((__m512i)(lane ^ bit), (__m512)x);
#elif VL == 8 && defined(__AVX2__)
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
    return (vf)_mm256_permutevar8x32_ps((__m256)x, (__m256i)(lane ^ bit));
#elif NEON
    return (vf)(bit == 1 ? vrev64q_f32((float32x4_t)x) : vextq_f32((float32x4_t)x, (float32x4_t)x, 2));
#else
    vf y;
    for (int i = 0; i < VL; i++) y[i] = x[i ^ bit];
    return y;
#endif
}

/* One step of the transform in pairs of lanes: their sum in the lower one, lower less upper in the other. */
INLINE vf NAME(butterfly)(vf x, int half) {
    vf sign;
    for (int i = 0; i < VL; i++) sign[i] = i & half ? -1.0f : 1.0f;
    return x * sign + NAME(swap)(x, half);
}

/* Walsh-Hadamard transform of one block, in place, scaled to keep lengths. */
INLINE void NAME(hadamard)(float *x, int64_t size) {
    const float scale = 1.0f / sqrtf((float)size);
    int64_t half = 1;
    if (size >= VL) {
        for (int64_t i = 0; i < size; i += VL) {
            vf v = LOAD(x + i);
            UNROLL for (int step = 1; step < VL; step *= 2) v = NAME(butterfly)(v, step);
            STORE(x + i, v);
        }
        half = VL;
    }
    for (; half < size; half *= 2)
        for (int64_t i = 0; i < size; i += 2 * half)
            for (int64_t j = i; j < i + half; j++) {
                float a = x[j], b = x[j + half];
                x[j] = a + b, x[j + half] = a - b;
            }
    for (int64_t j = 0; j < size; j++) x[j] *= scale;
}

static void NAME(rotate)(float *x, int64_t ldx, int64_t t, int64_t heads, int64_t dim) {
    int64_t size = dim & -dim;
    for (int64_t r = 0; r < t; r++)
        for (int64_t i = 0; i < heads * dim; i += size) NAME(hadamard)(x + r * ldx + i, size);
}

/* The mean of a head's keys as they stand around a slot (a multiple of CENTRE_ROWS) of a closed page: RoPE, then rotation. */
static void NAME(centre_at)(const kv_paged *kv, int64_t head, int64_t place, int64_t slot, float *out) {
    int64_t half = kv->rope_half, at = (place * kv->page_size + slot) / CENTRE_ROWS;
    memcpy(out, kv->centre + head * kv->dim_k, kv->dim_k * sizeof(float));
    if (half) NAME(rope)(out, 0, 1, 1, kv->dim_k, 2 * half, kv->cos + at * half, kv->sin + at * half);
    NAME(rotate)(out, 0, 1, 1, kv->dim_k);
}

/* n elements in 16 or 32 bits. */
static void NAME(encode)(const float *x, int64_t n, const kv_codec *codec, uint8_t *out) {
    int is_half = codec->mantissa == 10;
    if (codec->bits == 32) {
        memcpy(out, x, n * 4);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits;
        float f = x[i] > 65504.0f ? 65504.0f : x[i] < -65504.0f ? -65504.0f : x[i]; /* no infinities in f16; NaN stays */
        bits = is_half ? NAME(to_half)(f) : float_to_bf16(x[i]);
        memcpy(out + 2 * i, &bits, 2);
    }
}

/* The head's record in a page of that class; `page`: counted from that of position `into_first` on. */
INLINE uint8_t *NAME(written)(const kv_class *of, int64_t page, int64_t head) {
    return (uint8_t *)(intptr_t)of->into[page] + of->offset + head * of->record.bytes;
}

/* New rows go into the open pages where there are any, else straight into the closed ones. */
static void NAME(store_part)(const float *k, int64_t ldk, const float *v, int64_t ldv, int64_t t, int64_t start,
                             const kv_paged *kv) {
    const kv_class *of = kv->sealed ? &kv->open : &kv->closed;
    const kv_record *rec = &of->record;
    for (int64_t r = 0; r < t; r++) {
        int64_t row = start + r - kv->into_first, page = row / kv->page_size, slot = row % kv->page_size;
        for (int64_t h = 0; h < kv->kv_heads; h++) {
            uint8_t *record = NAME(written)(of, page, h);
            NAME(encode)(k + r * ldk + h * kv->dim_k, kv->dim_k, &rec->codec_k, record + slot * rec->k_row);
            NAME(encode)(v + r * ldv + h * kv->dim_v, kv->dim_v, &rec->codec_v, record + rec->v_offset + slot * rec->v_row);
        }
    }
}

static void NAME(store)(const float *k, int64_t ldk, const float *v, int64_t ldv, const kv_part *parts, int64_t n_parts) {
    for (const kv_part *p = parts; p < parts + n_parts; p++)
        NAME(store_part)(k + p->row * ldk, ldk, v + p->row * ldv, ldv, p->rows, p->start, p->kv);
}

/* ---- sealing: a full 16-bit page becomes codes; grid.py and float8.py are the specification ------------------------ */

INLINE vf NAME(round)(vf x) { /* to the nearest whole number, even where two are */
#if VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif VL == 8 && defined(__AVX2__)
    return (vf)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif NEON
    return (vf)vrndnq_f32((float32x4_t)x);
#else
    for (int i = 0; i < VL; i++) x[i] = rintf(x[i]);
    return x;
#endif
}

INLINE float NAME(round_half)(float x) { /* to float16 and back */
    return NAME(half)(NAME(to_half)(x));
}

/* What rounding to codes does to VL elements: the squares of the differences. */
INLINE vf NAME(grid_error)(vf x, float scale, float centre, float lowest, float highest) {
    vf u = NAME(round)(x / scale + centre);
    vi less = u < lowest, more = u > highest;
    u = (vf)(((vi)u & ~less & ~more) | ((vi)SPLAT(lowest) & less) | ((vi)SPLAT(highest) & more));
    vf e = (u - centre) * scale - x;
    return e * e;
}

/* The scale of a row: the largest element just held, times each of `tries` factors 1, 1 - 0.03, ...; least error. */
static float NAME(grid_scale)(const float *x, int64_t n, float centre, float lowest, float highest, int tries) {
    float largest = 0, best = 0, best_error = INFINITY;
    int64_t whole = n / VL * VL;
    for (int64_t i = 0; i < n; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    for (int t = 0; t < tries; t++) {
        float scale = largest * ((1.0f - 0.03f * (float)t) / (highest - centre)), error = 0;
        scale = scale < 6e-8f ? 6e-8f : scale > 65504.0f ? 65504.0f : scale;
        scale = NAME(round_half)(scale);
        if (tries == 1) return scale;
        vf errors = {0};
        for (int64_t i = 0; i < whole; i += VL) errors += NAME(grid_error)(LOAD(x + i), scale, centre, lowest, highest);
        for (int64_t i = whole; i < n; i++) error += NAME(grid_error)(SPLAT(x[i]), scale, centre, lowest, highest)[0];
        error += NAME(hsum)(errors);
        if (error < best_error) best_error = error, best = scale;
    }
    return best;
}

/* An 8-bit float with that many bits of mantissa: round to nearest even, clamped to +-largest. */
INLINE uint8_t NAME(float8)(float x, int mantissa, float largest) {
    int bias = (1 << (6 - mantissa)) - 1, cut = 23 - mantissa;
    uint32_t sign = f32_bits(x) >> 24 & 0x80;
    float a = fabsf(x) > largest ? largest : fabsf(x);
    uint32_t u = f32_bits(a);
    if (u < (uint32_t)(128 - bias) << 23) /* subnormal: steps of 2^(1 - bias - mantissa) */
        return (uint8_t)(sign | (uint32_t)rintf(a * bits_f32((uint32_t)(126 + bias + mantissa) << 23)));
    u += (1u << (cut - 1)) - 1 + (u >> cut & 1);
    return (uint8_t)(sign | ((u >> cut) - ((uint32_t)(127 - bias) << mantissa)));
}

/* One row of n elements; returns its scale (8-bit floats: `fixed`, which the row is divided by). */
static float NAME(encode_row)(const float *x, int64_t n, const kv_codec *codec, float fixed, uint8_t *out) {
    if (codec->bits >= 16) {
        NAME(encode)(x, n, codec, out);
        return 1.0f;
    }
    if (codec->mantissa) { /* a loop each, which is compiled for its mantissa */
        float largest = (float)codec->largest;
        if (codec->mantissa == 3)
            for (int64_t i = 0; i < n; i++) out[i] = NAME(float8)(x[i] / fixed, 3, largest);
        else
            for (int64_t i = 0; i < n; i++) out[i] = NAME(float8)(x[i] / fixed, 2, largest);
        return fixed;
    }
    int bits = (int)codec->bits;
    float highest = (float)((1 << bits) - 1), centre = NAME(middle)(codec), lowest = (float)codec->lowest;
    float scale = NAME(grid_scale)(x, n, centre, lowest, highest, (int)codec->tries);
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++) {
            float f = rintf(x[i] / scale + centre);
            out[i] = (uint8_t)(f < lowest ? lowest : f > highest ? highest : f);
        }
        return scale;
    }
    int64_t quarter = NAME(fields)(codec, n);
    uint8_t *above = out + 2 * quarter; /* the plane of what is above four bits */
    memset(out, 0, quarter * bits / 2);
    for (int64_t i = 0, j = 0, part = 0; i < n; i++, j++) { /* field j of each plane; see grid.py */
        if (j == quarter) j = 0, part++;
        float f = rintf(x[i] / scale + centre);
        uint32_t u = (uint32_t)(f < lowest ? lowest : f > highest ? highest : f);
        out[2 * j + part / 2] |= (uint8_t)((u & 15) << (4 * (part % 2)));
        if (bits == 6) above[j] |= (uint8_t)((u >> 4) << (2 * part));
        if (bits == 5) above[j < quarter / 2 ? j : j - quarter / 2] |= (uint8_t)((u >> 4) << (j < quarter / 2 ? part : part + 4));
    }
    return scale;
}

INLINE void NAME(put_half)(float x, uint8_t *out) {
    uint16_t bits = NAME(to_half)(x);
    memcpy(out, &bits, 2);
}

typedef struct {
    const kv_paged *kv;
    int64_t first, end;
} NAME(seal_args);

static void NAME(seal_task)(void *arg, int64_t task, int thread) {
    const NAME(seal_args) *a = arg;
    const kv_paged *kv = a->kv;
    const kv_record *from = &kv->open.record, *to = &kv->closed.record;
    int64_t size = kv->page_size, head = task % kv->kv_heads, page = a->first / size + task / kv->kv_heads;
    int64_t lo = a->first > page * size ? a->first - page * size : 0, hi = a->end < (page + 1) * size ? a->end - page * size : size;
    page -= kv->into_first / size;
    const uint8_t *in = NAME(written)(&kv->open, page, head);
    uint8_t *out = NAME(written)(&kv->closed, page, head);
    float *x = scratch(thread, (size_t)(2 * kv->dim_k + kv->dim_v)), *mean = x + kv->dim_k + kv->dim_v;
    NAME(rows_fn) read_k = NAME(reader_of)(&from->codec_k)->rows, read_v = NAME(reader_of)(&from->codec_v)->rows;
    for (int64_t j = lo; j < hi; j++) {
        read_k(in, from->k_row, j, j + 1, &from->codec_k, kv->dim_k, x, 0);
        if (kv->centre && (j == lo || j % CENTRE_ROWS == 0)) NAME(centre_at)(kv, head, kv->into_place + page, j / CENTRE_ROWS * CENTRE_ROWS, mean);
        for (int64_t i = 0; kv->centre && i < kv->dim_k; i++) x[i] -= mean[i];
        float scale = NAME(encode_row)(x, kv->dim_k, &to->codec_k, kv->static_k ? kv->static_k[head] : 1.0f, out + j * to->k_row);
        if (to->k_scales) NAME(put_half)(scale, out + to->k_scales + 2 * j);
        read_v(in + from->v_offset, from->v_row, j, j + 1, &from->codec_v, kv->dim_v, x, 0);
        scale = NAME(encode_row)(x, kv->dim_v, &to->codec_v, kv->static_v ? kv->static_v[head] : 1.0f,
                                 out + to->v_offset + j * to->v_row);
        if (to->v_scales) NAME(put_half)(scale, out + to->v_scales + 2 * j);
    }
}

static void NAME(seal)(const kv_paged *kv, int64_t first, int64_t end) {
    NAME(seal_args) a = {kv, first, end};
    parallel(((end - 1) / kv->page_size - first / kv->page_size + 1) * kv->kv_heads, NAME(seal_task), &a);
}
