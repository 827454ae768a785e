/* The mass of attention: what each row gets of the queries. Included by cpu_attention.h.
 *
 * Scores are noted while queries look at pages; when all are there, so are their largest and their sum, and they become
 * probabilities. These are rounded to multiples of 1 / MASS_UNIT one by one: whole numbers add up to the same for any chunks
 * and threads. */

/* Whether any of the tokens before t1 is to be noted. */
INLINE int NAME(notes)(const NAME(attn_args) *a, int64_t t1) { return a->mass && a->start + t1 > a->since; }

/* What the probabilities of a row are of exp(score - max): of its state, and of a head that may have a sink. */
INLINE float NAME(per_exp)(const NAME(attn_args) *a, const float *end, int64_t h) {
    if (!a->sinks) return 1.0f / end[1];
    float top = end[0] > a->sinks[h] ? end[0] : a->sinks[h];
    vf factors = NAME(exp)((vf){end[0] - top, a->sinks[h] - top});
    return factors[0] / (end[1] * factors[0] + factors[1]);
}

/* Have the larger one at a place that other tasks may write to. */
INLINE void NAME(raise)(int64_t *place, int64_t value) {
    int64_t now = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (now < value && !__atomic_compare_exchange_n(place, &now, value, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

/* Add what the slots of an entry got of tokens [from, to), so few that sums of 32 bits have room for them; see add_mass. */
INLINE void NAME(add_some)(const NAME(attn_args) *a, const kv_entry *e, const float *state, int64_t head, int64_t t0, int64_t from,
                           int64_t to, const float *noted, int alone) {
    const kv_paged *kv = a->kv;
    int64_t least = kv->page_size, most = 0, lo, hi, *mass = a->mass + head * a->ld_mass + e->first;
    int32_t sums[MOST_SLOTS] = {0};
    for (int64_t t = from; t < to; t++) {
        if (!NAME(seen)(e, a->window, a->start + t, &lo, &hi)) continue;
        least = lo < least ? lo : least, most = hi > most ? hi : most;
        for (int64_t g = 0, r = (t - t0) * a->group; g < a->group; g++, r++) {
            const float *end = state + r * a->stride + a->dvp;
            const float *scores = noted + (r * kv->n_entries + (e - kv->entries)) * a->padded;
            float unit = NAME(per_exp)(a, end, head * a->group + g) * MASS_UNIT;
            for (int64_t j = lo / VL * VL; j < hi; j += VL) {
                vi before, got = __builtin_convertvector(NAME(round)(NAME(exp)(LOAD(scores + j) - end[0]) * unit), vi);
                memcpy(&before, sums + j, sizeof(vi));
                if (a->largest) {
                    vi more = got > before;
                    before = (got & more) | (before & ~more);
                } else before += got;
                memcpy(sums + j, &before, sizeof(vi));
            }
        }
    }
    for (int64_t j = least; j < most; j++)
        if (a->largest) NAME(raise)(mass + j, sums[j]);
        else if (alone) mass[j] += sums[j];
        else if (sums[j]) __atomic_fetch_add(mass + j, (int64_t)sums[j], __ATOMIC_RELAXED);
}

/* Add what all entries got of tokens [t0, t1) and the group of one KV head: `noted` [rows, entries, padded]. `alone`: no other
 * task adds to the mass of that head meanwhile. */
static void NAME(add_mass)(const NAME(attn_args) *a, const float *state, int64_t head, int64_t t0, int64_t t1, const float *noted,
                           int alone) {
    int64_t from = a->since - a->start > t0 ? a->since - a->start : t0, some = a->group < 64 ? 64 / a->group : 1;
    for (int64_t t = from; t < t1; t += some)
        for (const kv_entry *e = a->kv->entries; e < a->kv->entries + a->kv->n_entries; e++)
            NAME(add_some)(a, e, state, head, t0, t, t + some < t1 ? t + some : t1, noted, alone);
}
