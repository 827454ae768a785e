/* Causal attention over the entries of a paged cache. Included by cpu_body.h.
 *
 * The queries of all heads of a key-value group, and in prefill of QUERY_BLOCK tokens, walk the entries together, LOOK_ROWS
 * positions at a time: a softmax is of all rows among these, so sums do not depend on the size of pages. Few
 * queries read packed rows, each once for QUERY_ROWS of them; many read floats, into which a page is decoded first. Both
 * are the same sums (cpu_codecs.h). Scales of rows are multiplied into scores and weights, and the middle of a grid of
 * codes is taken off the sums. Where the processor multiplies bytes (cpu_keys.h), products with keys of 8 or 4 bits are
 * integers: a query is 15-bit multiples of a scale, which adds less than a hundredth to the error that such keys have.
 *
 * Sealed keys lack a mean c, which takes part in RoPE at the middle of each CENTRE_ROWS rows. Its score with a query q,
 * both turned, is the sum over pairs (a, b) of dims of (q_a c_a + q_b c_b) cos + (q_b c_a - q_a c_b) sin, with the angles of
 * that place: the products are made once for a query, and no mean is ever rotated.
 *
 * In joined records a score is of the value, too: a prepared query has a second part for it. Keys have 16 bits or more. */

#define QUERY_BLOCK 16 /* queries that share one decoded tile in prefill; blocks begin at multiples, as pages do */

typedef struct {
    const float *q, *turned; /* turned: for turned entries; it may be NULL */
    int64_t ldq, ld_turned, t, heads, start, window;
    float scale, softcap;
    const float *sinks; /* a logit of each head, which takes part in the softmax and has no value; it may be NULL */
    const kv_paged *kv;
    float *out;
    int64_t *mass; /* see kv_part; NULL = nothing is noted */
    int64_t ld_mass, since, largest;
    int64_t group, padded; /* query heads of a KV head; slots of a page, in whole vectors */
    int64_t most_pieces;   /* entries that have some of the same LOOK_ROWS positions, at most */
    int64_t dkp, dvp, stride, ld_query; /* floats of a key, a value, a row's state and a prepared query, padded */
    int64_t multiples; /* where a prepared query has its multiples, for closed pages; 0 = keys are floats */
    int64_t second; /* where it has what is multiplied with values, [dvp], and the sum of that; 0 = nothing */
    int64_t n_blocks, n_spans, n_shares;
    int64_t *spans;  /* one query: where the spans begin that it sees, [n_spans + 1]; `n_shares` tasks for each head */
    float *partial;  /* of each span, [kv_heads, n_spans, group, stride]; NULL = the work is divided into blocks */
    float *prepared; /* of all heads: see `prepare` */
    float *noted;    /* one query: its scores, [kv_heads, group, entries, padded] */
    int64_t first_task; /* of the part, among those of all parts */
    uint8_t *read;      /* whether an entry is read, [choice blocks, kv_heads, n_entries]; NULL = all are (cpu_choosing.h) */
} NAME(attn_args);

typedef struct { /* slots [lo, hi) of an entry, those that are read of LOOK_ROWS positions, for one head */
    const kv_entry *entry;
    int64_t lo, hi, at; /* `at`: the slot that would be the first of these positions */
    const uint8_t *k, *v;
    int64_t k_row, v_row;
    const NAME(reader) *read_k, *read_v;
    float k_scale[LOOK_ROWS], v_scale[LOOK_ROWS]; /* of each position */
    float middle_k, middle_v;
    const float *cos, *sin; /* where keys lack a mean: of each CENTRE_ROWS slots */
    int centred, turned;
    const uint8_t *folded; /* the keys for products in integers; NULL = there are none */
} NAME(piece);

typedef struct { /* room for scores of QUERY_ROWS queries, [QUERY_ROWS, LOOK_ROWS] each */
    float *raw, *also, *scores;
} NAME(look_room);

/* Slots of an entry that a query at `pos` sees, sets [*lo, *hi); returns whether there are any. */
INLINE int NAME(seen)(const kv_entry *e, int64_t window, int64_t pos, int64_t *lo, int64_t *hi) {
    int64_t oldest = window && pos - window + 1 > e->first ? pos - window + 1 - e->first : 0;
    *lo = oldest > e->lo ? oldest : e->lo;
    *hi = pos + 1 - e->first < e->hi ? pos + 1 - e->first : e->hi;
    return e->since <= pos && pos < e->until && *lo < *hi;
}

/* The same of a piece of an entry. */
INLINE int NAME(sees)(const NAME(piece) *t, int64_t window, int64_t pos, int64_t *lo, int64_t *hi) {
    int there = NAME(seen)(t->entry, window, pos, lo, hi);
    *lo = *lo > t->lo ? *lo : t->lo, *hi = *hi < t->hi ? *hi : t->hi;
    return there && *lo < *hi;
}

/* The span that an entry belongs to; it depends on positions alone, so that sums are the same ones whatever else is there. */
INLINE int64_t NAME(span_of)(const kv_entry *e) { return e->first / SPAN_ROWS; }

/* Positions that are looked at together, or one page if that is larger. */
INLINE int64_t NAME(look_rows)(const kv_paged *kv) { return kv->page_size > LOOK_ROWS ? kv->page_size : LOOK_ROWS; }

/* Whether an entry's page stands where pages begin, so that others are looked at with it; elsewhere it is alone. */
INLINE int NAME(in_place)(const kv_paged *kv, const kv_entry *e) { return e->first % kv->page_size == 0; }

/* The first position of those that are looked at with an entry's first ones. */
INLINE int64_t NAME(look_of)(const kv_paged *kv, const kv_entry *e) {
    int64_t rows = NAME(look_rows)(kv);
    return NAME(in_place)(kv, e) ? e->first / rows * rows : e->first;
}

/* Whether some query sees a row of entries [e, next) at a position where it sees one of `next`, too. */
INLINE int NAME(in_the_way)(const kv_entry *e, const kv_entry *next) {
    for (; e < next; e++)
        if (e->first == next->first && e->lo < next->hi && next->lo < e->hi && e->since < next->until && next->since < e->until) return 1;
    return 0;
}

/* The entry behind those that are looked at together with e, which are before `end`. */
INLINE const kv_entry *NAME(next_look)(const kv_paged *kv, const kv_entry *e, const kv_entry *end) {
    const kv_entry *next = e + 1;
    int64_t position = NAME(look_of)(kv, e);
    while (next < end && NAME(in_place)(kv, e) && NAME(in_place)(kv, next) && NAME(look_of)(kv, next) == position &&
           !NAME(in_the_way)(e, next))
        next++;
    return next;
}

/* Running softmax of one (query, head) row: max, sum, accumulator [dvp]. */
INLINE void NAME(merge)(float *m, float *l, float *acc, float pm, float pl, const float *pacc, int64_t dvp) {
    if (pm == -INFINITY) return;
    float top = *m > pm ? *m : pm;
    vf factors = NAME(exp)((vf){*m == -INFINITY ? -INFINITY : *m - top, pm - top});
    float old = factors[0], add = factors[1];
    for (int64_t d = 0; d < dvp; d += VL) STORE(acc + d, LOAD(acc + d) * old + LOAD(pacc + d) * add);
    *l = *l * old + pl * add;
    *m = top;
}

/* The state of rows that have seen nothing. */
INLINE void NAME(nothing)(float *state, int64_t rows, int64_t stride) {
    memset(state, 0, (size_t)rows * stride * sizeof(float));
    for (int64_t r = 0; r < rows; r++) state[r * stride + stride - 2] = -INFINITY;
}

/* ---- queries ------------------------------------------------------------------------------------------------------ */

/* Whether products with the keys of closed pages are in integers. */
INLINE int NAME(in_integers)(const kv_paged *kv) {
    const kv_codec *codec = &kv->closed.record.codec_k;
    return int_keys && !kv->exact && !codec->mantissa && (codec->bits == 8 || codec->bits == 4) && kv->dim_k % (4 * int_keys->lanes) == 0 &&
           kv->dim_k <= 512 && kv->page_size % int_keys->lanes == 0;
}

/* The multiples of a query in the order of folded codes: as dims are, or for 4 bits as their planes are packed. */
INLINE void NAME(in_order)(const int32_t *x, int64_t dim, int bits, int32_t *out) {
    int64_t quarter = dim / 4, fields = int_keys->lanes; /* of a chunk */
    if (bits == 8) {
        memcpy(out, x, dim * sizeof(int32_t));
        return;
    }
    for (int64_t at = 0; at < quarter; at += fields, out += 4 * fields)
        for (int64_t j = 0; j < fields; j++)
            for (int64_t p = 0; p < 4; p++) out[p % 2 * 2 * fields + 2 * j + p / 2] = x[p * quarter + at + j];
}

/* A query q as multiples; `sum` of its elements, which is no number where one is none; room: of 2 * dim. */
INLINE void NAME(to_multiples)(const float *q, float sum, int64_t dim, const kv_codec *codec, kv_multiples *out, int32_t *room) {
    float largest = 0;
    for (int64_t i = 0; i < dim; i++) largest = fabsf(q[i]) > largest ? fabsf(q[i]) : largest;
    float factor = largest > 1e-30f ? MULTIPLES_MOST / largest : 0.0f;
    int32_t total = 0, *ordered = room + dim;
    for (int64_t i = 0; i < dim; i++) {
        float x = q[i] * factor;
        room[i] = (int32_t)(x + (x < 0 ? -0.5f : 0.5f));
        total += room[i];
    }
    NAME(in_order)(room, dim, (int)codec->bits, ordered);
    int8_t *parts = (int8_t *)out->parts;
    for (int64_t i = 0, each = int_keys->each; i < dim; i++) {
        int32_t high = (ordered[i] + 64) >> 7;
        int8_t *part = parts + i / each * 2 * each + i % each;
        part[0] = (int8_t)high, part[each] = (int8_t)(ordered[i] - 128 * high);
    }
    out->scale = largest / MULTIPLES_MOST + (sum - sum);
    out->less = total * (int32_t)(codec->lowest + (INT64_C(1) << codec->bits) - 1 - (codec->bits == 8 ? 2 * int_keys->taken : 0));
}

/* A prepared query has behind its dims: their sum, its score with the dims of the mean that do not turn, its products with
 * those that do, of cos and of sin; its multiples; and its second part. */
INLINE void NAME(lay_out_query)(NAME(attn_args) *a) {
    const kv_paged *kv = a->kv;
    a->ld_query = a->dkp + 2 + 2 * kv->rope_half;
    if (NAME(in_integers)(kv)) a->multiples = a->ld_query, a->ld_query += (int64_t)sizeof(kv_multiples) / 4 + kv->dim_k / 2;
    if (kv->joined) a->second = (a->ld_query + VL - 1) / VL * VL, a->ld_query = a->second + a->dvp + 1;
    a->ld_query = (a->ld_query + VL - 1) / VL * VL;
}

INLINE void NAME(with_mean)(const kv_paged *kv, int64_t head, const float *q, float *out) {
    const float *c = kv->centre + head * kv->dim_k;
    int64_t half = kv->rope_half;
    float still = 0, *with_cos = out + 1, *with_sin = with_cos + half;
    for (int64_t i = 2 * half; i < kv->dim_k; i++) still += q[i] * c[i];
    for (int64_t i = 0; i < half; i++) {
        with_cos[i] = q[i] * c[i] + q[i + half] * c[i + half];
        with_sin[i] = q[i + half] * c[i] - q[i] * c[i + half];
    }
    out[0] = still;
}

/* Queries of the group of one KV head from token t0 on, [rows, ld_query]; `room`: for two of their dims. */
INLINE void NAME(prepare)(const NAME(attn_args) *a, const float *q, int64_t ldq, int64_t head, int64_t t0, int64_t rows,
                          float *out, float *room) {
    int64_t dim = a->kv->dim_k, more = a->second ? a->kv->dim_v : 0;
    for (int64_t r = 0; r < rows; r++, out += a->ld_query) {
        const float *from = q + (t0 + r / a->group) * ldq + (head * a->group + r % a->group) * (dim + more);
        memcpy(out, from, dim * sizeof(float));
        memset(out + dim, 0, (a->ld_query - dim) * sizeof(float));
        out[a->dkp] = NAME(sum)(out, 0, 0, dim);
        if (more) {
            memcpy(out + a->second, from + dim, more * sizeof(float));
            out[a->second + a->dvp] = NAME(sum)(out + a->second, 0, 0, more);
        }
        if (a->multiples)
            NAME(to_multiples)(out, out[a->dkp], dim, &a->kv->closed.record.codec_k, (kv_multiples *)(out + a->multiples),
                               (int32_t *)room);
        if (!a->kv->centre) continue;
        memcpy(room, out, dim * sizeof(float));
        NAME(rotate)(room, 0, 1, 1, dim); /* back to the basis in which RoPE turns */
        NAME(with_mean)(a->kv, head, room, out + a->dkp + 1);
    }
}

/* Ordinary queries and, behind them, the turned ones where there are any. */
INLINE void NAME(prepare_all)(const NAME(attn_args) *a, int64_t head, int64_t t0, int64_t rows, float *out, float *room) {
    NAME(prepare)(a, a->q, a->ldq, head, t0, rows, out, room);
    if (a->turned) NAME(prepare)(a, a->turned, a->ld_turned, head, t0, rows, out + rows * a->ld_query, room);
}

/* Floats that they take. */
INLINE int64_t NAME(prepared_floats)(const NAME(attn_args) *a, int64_t rows) { return (a->turned ? 2 : 1) * rows * a->ld_query; }

#include "cpu_look.h"
#include "cpu_choosing.h"

/* ---- all entries --------------------------------------------------------------------------------------------------- */

/* Rows of decoded keys that the entries of LOOK_ROWS positions take together. */
INLINE int64_t NAME(piece_rows)(const NAME(attn_args) *a) {
    return a->most_pieces * (a->kv->page_size < LOOK_ROWS ? a->padded : LOOK_ROWS);
}

/* Floats of scratch that `attend` needs. */
INLINE size_t NAME(attend_floats)(const NAME(attn_args) *a, int64_t rows) {
    return (size_t)(NAME(piece_rows)(a) * (a->dkp + a->dvp) + 3 * QUERY_ROWS * LOOK_ROWS + rows * a->stride) +
           (size_t)a->most_pieces * sizeof(NAME(piece)) / sizeof(float) + 16;
}

/* The pieces of entries [e, end) that queries at [first, last] see of LOOK_ROWS positions from `position` on; *looked: whether they
 * see any, which may be left out. */
INLINE int64_t NAME(open_pieces)(const NAME(attn_args) *a, const kv_entry *e, const kv_entry *end, int64_t position, int64_t head,
                                 int64_t first, int64_t last, const uint8_t *read, int many, float *keys, float *values,
                                 NAME(piece) *pieces, int *looked) {
    int64_t n = 0, lo, hi, from, to, rows = 0;
    for (; e < end; e++) {
        if (last < e->since || first >= e->until) continue;
        NAME(seen)(e, a->window, first, &lo, &to); /* the oldest row that one of these queries sees */
        NAME(seen)(e, a->window, last, &from, &hi); /* and the newest */
        lo = position - e->first > lo ? position - e->first : lo;
        hi = position + LOOK_ROWS - e->first < hi ? position + LOOK_ROWS - e->first : hi;
        if (lo >= hi) continue;
        *looked = 1;
        if (read && !read[e - a->kv->entries]) continue;
        NAME(open_piece)(a, e, position, head, lo, hi, many, keys + rows * a->dkp, values + rows * a->dvp, pieces + n++);
        rows += TOUCHED(lo, hi);
    }
    return n;
}

/* How many of `rows` rows from row r on see the same slots of all pieces. */
INLINE int NAME(alike)(const NAME(attn_args) *a, const NAME(piece) *pieces, int64_t n_pieces, int64_t first, int64_t r, int64_t rows) {
    int64_t lo, hi, from, to;
    int n = 1;
    for (; n < QUERY_ROWS && r + n < rows; n++) {
        if ((r + n) / a->group == r / a->group) continue; /* a head of the same token */
        for (const NAME(piece) *t = pieces; t < pieces + n_pieces; t++) {
            int one = NAME(sees)(t, a->window, first + r / a->group, &lo, &hi);
            int other = NAME(sees)(t, a->window, first + (r + n) / a->group, &from, &to);
            if (one != other || (one && (lo != from || hi != to))) return n;
        }
    }
    return n;
}

/* Prepared queries of tokens [t0, t1) x the group of one KV head over entries [e0, e1), span by span; state [rows, stride] is
 * acc, max, sum of each. `each`: spans that are seen stay apart, their states stand behind each other. `noted`: where scores go,
 * [rows, entries, padded]; NULL = nowhere. */
static void NAME(attend)(const NAME(attn_args) *a, int64_t head, int64_t t0, int64_t t1, int64_t e0, int64_t e1,
                         const float *queries, float *state, int each, float *noted, float *work) {
    const kv_paged *kv = a->kv;
    int64_t rows = (t1 - t0) * a->group, first = a->start + t0, last = a->start + t1 - 1, decoded = NAME(piece_rows)(a);
    int many = rows > 2 * QUERY_ROWS;
    float *keys = work, *values = keys + decoded * a->dkp, *raw = values + decoded * a->dvp;
    NAME(look_room) room = {raw, raw + QUERY_ROWS * LOOK_ROWS, raw + 2 * QUERY_ROWS * LOOK_ROWS};
    NAME(piece) *pieces = (NAME(piece) *)(((uintptr_t)(raw + 3 * QUERY_ROWS * LOOK_ROWS) + 63) / 64 * 64);
    float *part = each ? state : (float *)(pieces + a->most_pieces);
    const uint8_t *read = a->read ? a->read + ((a->start % CHOICE_BLOCK + t0) / CHOICE_BLOCK * kv->kv_heads + head) * kv->n_entries : NULL;
    if (many || a->dkp != kv->dim_k || a->dvp != kv->dim_v) /* what is behind the dims */
        memset(work, 0, (size_t)(decoded * (a->dkp + a->dvp)) * sizeof(float));
    if (!each) NAME(nothing)(state, rows, a->stride);
    for (const kv_entry *e = kv->entries + e0, *end = kv->entries + e1, *next; e < end;) {
        int64_t span = NAME(span_of)(e);
        int any = 0;
        for (; e < end && NAME(span_of)(e) == span; e = next) {
            int64_t position = NAME(look_of)(kv, e), beyond = position + NAME(look_rows)(kv);
            next = NAME(next_look)(kv, e, end);
            for (; position < beyond; position += LOOK_ROWS) {
                int looked = 0;
                int64_t n_pieces = NAME(open_pieces)(a, e, next, position, head, first, last, read, many, keys, values, pieces, &looked);
                if (looked && !any++) NAME(nothing)(part, rows, a->stride);
                for (int64_t r = 0, n; n_pieces && r < rows; r += n) {
                    n = NAME(alike)(a, pieces, n_pieces, first, r, rows);
                    NAME(look)(a, pieces, n_pieces, queries + r * a->ld_query, rows * a->ld_query, part + r * a->stride, &room,
                               noted ? noted + r * kv->n_entries * a->padded : NULL, (int)n, first + r / a->group);
                }
            }
        }
        if (each && any) part += rows * a->stride;
        for (int64_t r = 0; !each && any && r < rows; r++) {
            float *s = state + r * a->stride, *p = part + r * a->stride;
            NAME(merge)(s + a->dvp, s + a->dvp + 1, s, p[a->dvp], p[a->dvp + 1], p, a->dvp);
        }
    }
}

INLINE void NAME(write_out)(const NAME(attn_args) *a, const float *state, int64_t head, int64_t t0, int64_t t1) {
    int64_t dim = a->kv->dim_v;
    for (int64_t r = 0; r < (t1 - t0) * a->group; r++) {
        const float *s = state + r * a->stride;
        int64_t h = head * a->group + r % a->group;
        float *out = a->out + ((t0 + r / a->group) * a->heads + h) * dim, total = s[a->dvp + 1], scale = 1.0f;
        if (a->sinks) {
            float top = s[a->dvp] > a->sinks[h] ? s[a->dvp] : a->sinks[h];
            scale = NAME(exp)(SPLAT(s[a->dvp] - top))[0];
            total = total * scale + NAME(exp)(SPLAT(a->sinks[h] - top))[0];
        }
        for (int64_t d = 0; d < dim; d++) out[d] = s[d] * scale / total;
    }
}

#include "cpu_mass.h"

/* ---- tasks ---------------------------------------------------------------------------------------------------------- */

static void NAME(attn_block_task)(const NAME(attn_args) *a, int64_t task, int thread) {
    int64_t head = task % a->kv->kv_heads, block = task / a->kv->kv_heads;
    int64_t t0 = block * QUERY_BLOCK - a->start % QUERY_BLOCK, t1 = t0 + QUERY_BLOCK < a->t ? t0 + QUERY_BLOCK : a->t;
    if (t0 < 0) t0 = 0;
    int64_t rows = (t1 - t0) * a->group, prepared = NAME(prepared_floats)(a, rows);
    int64_t notes = NAME(notes)(a, t1) ? rows * a->kv->n_entries * a->padded : 0;
    float *queries = scratch(thread, prepared + 2 * a->dkp + rows * a->stride + notes + NAME(attend_floats)(a, rows));
    float *room = queries + prepared, *state = room + 2 * a->dkp, *noted = state + rows * a->stride;
    NAME(prepare_all)(a, head, t0, rows, queries, room);
    NAME(attend)(a, head, t0, t1, 0, a->kv->n_entries, queries, state, 0, notes ? noted : NULL, noted + notes);
    NAME(write_out)(a, state, head, t0, t1);
    if (notes) NAME(add_mass)(a, state, head, t0, t1, noted, 0);
}

static void NAME(attn_share_task)(const NAME(attn_args) *a, int64_t task, int thread) {
    int64_t head = task / a->n_shares, share = task % a->n_shares;
    int64_t s0 = share * a->n_spans / a->n_shares, s1 = (share + 1) * a->n_spans / a->n_shares;
    const float *queries = a->prepared + head * NAME(prepared_floats)(a, a->group);
    float *noted = a->noted ? a->noted + head * a->group * a->kv->n_entries * a->padded : NULL;
    NAME(attend)(a, head, 0, 1, a->spans[s0], a->spans[s1], queries,
                 a->partial + (head * a->n_spans + s0) * a->group * a->stride, 1, noted, scratch(thread, NAME(attend_floats)(a, a->group)));
}

/* One query over several spans: they are merged in the order in which prefill meets them. */
static void NAME(merge_spans)(const NAME(attn_args) *a) {
    for (int64_t head = 0; head < a->kv->kv_heads; head++) {
        float *state = a->partial + head * a->n_spans * a->group * a->stride; /* the first span's */
        for (int64_t s = 1; s < a->n_spans; s++)
            for (int64_t r = 0; r < a->group; r++) {
                float *t = state + r * a->stride, *p = state + (s * a->group + r) * a->stride;
                NAME(merge)(t + a->dvp, t + a->dvp + 1, t, p[a->dvp], p[a->dvp + 1], p, a->dvp);
            }
        NAME(write_out)(a, state, head, 0, 1);
        if (a->noted) NAME(add_mass)(a, state, head, 0, 1, a->noted + head * a->group * a->kv->n_entries * a->padded, 1);
    }
}

typedef struct {
    const NAME(attn_args) *parts;
    int64_t n_parts;
} NAME(attn_parts);

static void NAME(attn_task)(void *arg, int64_t task, int thread) {
    const NAME(attn_parts) *all = arg;
    const NAME(attn_args) *a = all->parts + all->n_parts - 1;
    while (task < a->first_task) a--;
    (a->partial ? NAME(attn_share_task) : NAME(attn_block_task))(a, task - a->first_task, thread);
}

/* Divide what a part's only query sees by spans, where it sees several: a task has some of one head. */
static void NAME(share_spans)(NAME(attn_args) *a) {
    const kv_paged *kv = a->kv;
    int64_t latest = -1, lo, hi;
    a->spans = malloc((kv->n_entries + 1) * sizeof(int64_t));
    if (!a->spans) abort();
    for (int64_t i = 0; i < kv->n_entries; i++) {
        int64_t span = NAME(span_of)(kv->entries + i);
        if (span != latest && NAME(seen)(kv->entries + i, a->window, a->start, &lo, &hi)) a->spans[a->n_spans++] = i, latest = span;
    }
    a->spans[a->n_spans] = kv->n_entries;
    if (a->n_spans < 2) return;
    int64_t enough = (8 * pool.tuner.limit + kv->kv_heads - 1) / kv->kv_heads, each = NAME(prepared_floats)(a, a->group);
    a->n_shares = a->n_spans < enough ? a->n_spans : enough;
    int64_t notes = NAME(notes)(a, 1) ? a->heads * kv->n_entries * a->padded : 0;
    a->partial = NAME(floats)(kv->kv_heads * (a->n_spans * a->group * a->stride + each) + 2 * a->dkp + notes);
    a->prepared = a->partial + kv->kv_heads * a->n_spans * a->group * a->stride;
    if (notes) a->noted = a->prepared + kv->kv_heads * each + 2 * a->dkp;
    for (int64_t head = 0; head < kv->kv_heads; head++)
        NAME(prepare_all)(a, head, 0, a->group, a->prepared + head * each, a->prepared + kv->kv_heads * each);
}

/* The most entries that have some of the same LOOK_ROWS positions. */
static int64_t NAME(most_together)(const kv_paged *kv) {
    const kv_entry *e = kv->entries, *end = e + kv->n_entries, *next;
    int64_t most = 1;
    for (; e < end; e = next) {
        next = NAME(next_look)(kv, e, end);
        most = next - e > most ? next - e : most;
    }
    return most;
}

static void NAME(attention)(const float *q, int64_t ldq, const float *turned, int64_t ld_turned, int64_t heads, int64_t window,
                            float scale, float softcap, const float *sinks, const kv_part *parts, int64_t n_parts, float *out) {
    NAME(attn_args) one, *all = n_parts == 1 ? &one : malloc(n_parts * sizeof(NAME(attn_args)));
    int64_t tasks = 0;
    if (!all) abort();
    for (int64_t i = 0; i < n_parts; i++) {
        const kv_part *p = parts + i;
        const kv_paged *kv = p->kv;
        NAME(attn_args) a = {q + p->row * ldq, turned ? turned + p->row * ld_turned : NULL, ldq, ld_turned, p->rows, heads,
                             p->start, window, scale, softcap, sinks, kv, out + p->row * heads * kv->dim_v,
                             p->mass, p->ld_mass, p->since, p->largest};
        a.group = heads / kv->kv_heads, a.padded = (kv->page_size + VL - 1) / VL * VL;
        a.dkp = (kv->dim_k + 4 * VL - 1) / (4 * VL) * (4 * VL), a.dvp = (kv->dim_v + 4 * VL - 1) / (4 * VL) * (4 * VL);
        a.stride = a.dvp + 2, a.most_pieces = NAME(most_together)(kv);
        NAME(lay_out_query)(&a);
        a.n_blocks = (p->start % QUERY_BLOCK + p->rows + QUERY_BLOCK - 1) / QUERY_BLOCK;
        a.first_task = tasks;
        if (kv->pages || kv->threshold > 0) NAME(choose)(&a);
        if (p->rows == 1) NAME(share_spans)(&a);
        tasks += kv->kv_heads * (a.partial ? a.n_shares : a.n_blocks);
        all[i] = a;
    }
    NAME(attn_parts) work = {all, n_parts};
    parallel(tasks, NAME(attn_task), &work);
    for (int64_t i = 0; i < n_parts; i++) {
        if (all[i].partial) NAME(merge_spans)(all + i);
        free(all[i].partial), free(all[i].spans), free(all[i].read);
    }
    if (all != &one) free(all);
}
