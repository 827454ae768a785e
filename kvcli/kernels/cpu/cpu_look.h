/* Queries look at LOOK_ROWS positions of a cache: pieces of its entries, scores, softmax, and sums of values. Included by
 * cpu_attention.h. */

/* Scores of the mean at the place of slot j. */
INLINE float NAME(mean_score)(const NAME(attn_args) *a, const NAME(piece) *t, const float *query, int64_t j) {
    int64_t half = a->kv->rope_half, at = j / CENTRE_ROWS * half, i = 0;
    const float *with_cos = query + a->dkp + 2, *with_sin = with_cos + half;
    float rest = query[a->dkp + 1];
    vf sum = {0};
    for (; i + VL <= half; i += VL) {
        sum = FMA(LOAD(with_cos + i), LOAD(t->cos + at + i), sum);
        sum = FMA(LOAD(with_sin + i), LOAD(t->sin + at + i), sum);
    }
    for (; i < half; i++) rest += with_cos[i] * t->cos[at + i] + with_sin[i] * t->sin[at + i];
    return NAME(hsum)(sum) + rest;
}

/* Ones in the lanes of slots [lo, hi), of those from j on. */
INLINE vi NAME(among)(int64_t j, int64_t lo, int64_t hi) {
    vi lane;
    for (int i = 0; i < VL; i++) lane[i] = i;
    return (lane + (int32_t)j >= (int32_t)lo) & (lane + (int32_t)j < (int32_t)hi);
}

/* Products of a query with slots [lo, hi) of a piece, `raw`, become its scores; `noted`: where they go, too, by slot, if not
 * NULL. */
INLINE void NAME(score)(const NAME(attn_args) *a, const NAME(piece) *t, const float *query, const float *raw, float *scores, float *noted,
                        int64_t lo, int64_t hi) {
    float bias = 0, middle = t->middle_k * query[a->dkp];
    int64_t from = lo / VL * VL;
    for (int64_t j = from; j < hi; j += VL) {
        if (t->centred && (j == from || j % CENTRE_ROWS == 0)) bias = NAME(mean_score)(a, t, query, j);
        vf s = ((LOAD(raw + j - t->at) - middle) * LOAD(t->k_scale + j - t->at) + bias) * a->scale;
        if (a->softcap > 0)
            for (int i = 0; i < VL; i++) s[i] = a->softcap * tanhf(s[i] / a->softcap);
        vi seen = NAME(among)(j, lo, hi);
        if (noted) STORE(noted + j, (vf)(((vi)s & seen) | ((vi)SPLAT(-INFINITY) & ~seen)));
        STORE(scores + j - t->at, (vf)(((vi)s & seen) | ((vi)LOAD(scores + j - t->at) & ~seen)));
    }
}

/* Scores of positions [lo, hi), whole vectors, in place to shares of the sum, *l; *m is the largest one, and *old what the state
 * before is multiplied by. */
INLINE void NAME(softmax)(float *scores, int64_t lo, int64_t hi, float *m, float *l, float *old) {
    float top = *m;
    vf tops = SPLAT(top), sums = {0};
    for (int64_t j = lo; j < hi; j += VL) {
        vf s = LOAD(scores + j);
        vi higher = s > tops;
        tops = (vf)(((vi)s & higher) | ((vi)tops & ~higher));
    }
    for (int i = 0; i < VL; i++) top = tops[i] > top ? tops[i] : top;
    *old = *m == -INFINITY ? 0.0f : NAME(exp)(SPLAT(*m - top))[0];
    for (int64_t j = lo; j < hi; j += VL) {
        vf p = NAME(exp)(LOAD(scores + j) - top);
        STORE(scores + j, p);
        sums += p;
    }
    *l = *l * *old + NAME(hsum)(sums);
    *m = top;
}

/* Shares of slots [lo, hi) of a piece to weights of its values; returns their sum. */
INLINE float NAME(weigh)(const NAME(piece) *t, const float *shares, float *weights, int64_t lo, int64_t hi) {
    vf sum = {0};
    for (int64_t j = lo / VL * VL; j < hi; j += VL) {
        vf w = LOAD(shares + j - t->at) * LOAD(t->v_scale + j - t->at);
        w = (vf)((vi)w & NAME(among)(j, lo, hi));
        STORE(weights + j - t->at, w);
        sum += w;
    }
    return NAME(hsum)(sum);
}

/* Products with the keys of slots [lo, hi) of a piece, [n, LOOK_ROWS] by position, and in joined records with the values. */
INLINE void NAME(products)(const NAME(attn_args) *a, const NAME(piece) *t, const float *queries, const NAME(look_room) *room, int n,
                           int64_t lo, int64_t hi) {
    if (t->folded)
        int_keys->dots(t->folded, t->k_row, lo, hi, a->kv->dim_k, a->kv->closed.record.codec_k.bits,
                       (const kv_multiples *)(queries + a->multiples), a->ld_query * (int64_t)sizeof(float), n, room->raw - t->at, LOOK_ROWS);
    else
        t->read_k->dots[n - 1](t->k, t->k_row, lo, hi, a->dkp / 4, queries, a->ld_query, room->raw - t->at, LOOK_ROWS);
    if (!a->second) return;
    t->read_v->dots[n - 1](t->v, t->v_row, lo, hi, a->dvp / 4, queries + a->second, a->ld_query, room->also - t->at, LOOK_ROWS);
    for (int r = 0; r < n; r++) {
        float middle = t->middle_v * queries[r * a->ld_query + a->second + a->dvp];
        float *to = room->raw + r * LOOK_ROWS - t->at, *from = room->also + r * LOOK_ROWS - t->at;
        const float *scale = t->v_scale - t->at;
        for (int64_t j = lo / VL * VL; j < hi; j += VL) STORE(to + j, LOAD(to + j) + (LOAD(from + j) - middle) * LOAD(scale + j));
    }
}

/* `n` rows, the first of which is at position `pos` and sees what the others see, look at some positions: queries [n, ld_query],
 * with `turned` floats further on those for turned entries, states [n, stride]; `noted`: where scores of the first row go, NULL =
 * nowhere. */
INLINE void NAME(look)(const NAME(attn_args) *a, const NAME(piece) *pieces, int64_t n_pieces, const float *queries, int64_t turned,
                       float *state, const NAME(look_room) *room, float *noted, int n, int64_t pos) {
    int64_t first = LOOK_ROWS, end = 0, lo, hi;
    float old[QUERY_ROWS], start[QUERY_ROWS];
    for (int64_t i = 0; i < n * LOOK_ROWS; i += VL) STORE(room->scores + i, SPLAT(-INFINITY));
    for (const NAME(piece) *t = pieces; t < pieces + n_pieces; t++) {
        if (!NAME(sees)(t, a->window, pos, &lo, &hi)) continue;
        const float *these = queries + (t->turned ? turned : 0);
        NAME(products)(a, t, these, room, n, lo, hi);
        for (int r = 0; r < n; r++) {
            float *note = noted ? noted + (r * a->kv->n_entries + (t->entry - a->kv->entries)) * a->padded : NULL;
            NAME(score)(a, t, these + r * a->ld_query, room->raw + r * LOOK_ROWS, room->scores + r * LOOK_ROWS, note, lo, hi);
        }
        int64_t from = lo / VL * VL - t->at, to = hi - t->at;
        first = from < first ? from : first, end = to > end ? to : end;
    }
    if (!end) return;
    for (int r = 0; r < n; r++) {
        float *last = state + r * a->stride + a->dvp;
        NAME(softmax)(room->scores + r * LOOK_ROWS, first, end, last, last + 1, old + r);
    }
    for (const NAME(piece) *t = pieces; t < pieces + n_pieces; t++) {
        if (!NAME(sees)(t, a->window, pos, &lo, &hi)) continue;
        for (int r = 0; r < n; r++)
            start[r] = -(t->middle_v * NAME(weigh)(t, room->scores + r * LOOK_ROWS, room->raw + r * LOOK_ROWS, lo, hi));
        t->read_v->mix[n - 1](t->v, t->v_row, lo, hi, a->dvp / 4, room->raw - t->at, LOOK_ROWS, old, start, state, a->stride);
        for (int r = 0; r < n; r++) old[r] = 1; /* a product with 1 and a sum with -0 change nothing */
    }
}

/* Scales of slots [lo, hi), or `fixed` where there are none, by position. */
INLINE void NAME(row_scales)(const uint8_t *scales, float fixed, int64_t lo, int64_t hi, int64_t at, float *out) {
    if (!scales)
        for (int64_t j = 0; j < LOOK_ROWS; j++) out[j] = fixed;
    else memset(out, 0, LOOK_ROWS * sizeof(float));
    for (int64_t j = lo; scales && j < hi; j++) out[j - at] = HALF(scales + 2 * j);
}

/* Whole vectors that slots [lo, hi) touch, for any instruction set: slots. */
#define TOUCHED(lo, hi) (((hi) + 15) / 16 * 16 - (lo) / 16 * 16)

/* Slots [lo, hi) of an entry, of LOOK_ROWS positions from `position` on; `many`: they are decoded into `keys` and `values`. */
INLINE void NAME(open_piece)(const NAME(attn_args) *a, const kv_entry *e, int64_t position, int64_t head, int64_t lo, int64_t hi,
                             int many, float *keys, float *values, NAME(piece) *t) {
    const kv_paged *kv = a->kv;
    const kv_class *of = e->open ? &kv->open : &kv->closed;
    const kv_record *rec = &of->record;
    const kv_codec *codec_k = &rec->codec_k, *codec_v = &rec->codec_v;
    const uint8_t *r = (const uint8_t *)(intptr_t)e->address + of->offset + head * rec->bytes;
    int64_t place = e->place * kv->page_size / CENTRE_ROWS * kv->rope_half, before = lo / 16 * 16; /* slots that `keys` lack */
    t->entry = e, t->lo = lo, t->hi = hi, t->at = position - e->first, t->turned = e->turned && a->turned;
    t->k = r, t->v = r + rec->v_offset, t->k_row = rec->k_row, t->v_row = rec->v_row;
    t->read_k = NAME(reader_of)(codec_k), t->read_v = NAME(reader_of)(codec_v);
    t->middle_k = NAME(middle)(codec_k), t->middle_v = NAME(middle)(codec_v);
    t->centred = kv->centre && !e->open, t->cos = kv->cos + place, t->sin = kv->sin + place;
    NAME(row_scales)(rec->k_scales ? r + rec->k_scales : NULL, (kv->static_k && !e->open ? kv->static_k[head] : 1.0f) * FP8_FACTOR(codec_k),
                     lo, hi, t->at, t->k_scale);
    NAME(row_scales)(rec->v_scales ? r + rec->v_scales : NULL, (kv->static_v && !e->open ? kv->static_v[head] : 1.0f) * FP8_FACTOR(codec_v),
                     lo, hi, t->at, t->v_scale);
    t->folded = NULL;
    keys -= before * a->dkp, values -= before * a->dvp;
    if (a->multiples && !e->open) {
        uint8_t *folded = (uint8_t *)(keys + before * a->dkp) - before * kv->dim_k;
        if (int_keys->fold) int_keys->fold(t->k, t->k_row, lo, hi, kv->dim_k, codec_k->bits, folded);
        t->folded = int_keys->fold ? folded : t->k, t->middle_k = 0;
    } else if (many || a->dkp != kv->dim_k) {
        t->read_k->rows(t->k, t->k_row, lo, hi, codec_k, kv->dim_k, keys, a->dkp);
        t->k = (const uint8_t *)keys, t->k_row = a->dkp * sizeof(float), t->read_k = &NAME(read_f32);
    }
    if (many || a->dvp != kv->dim_v) {
        t->read_v->rows(t->v, t->v_row, lo, hi, codec_v, kv->dim_v, values, a->dvp);
        t->v = (const uint8_t *)values, t->v_row = a->dvp * sizeof(float), t->read_v = &NAME(read_f32);
    }
}
