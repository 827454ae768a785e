/* Pairs of a row and an expert, in the order of experts, so that each expert's matrices are read once. Included by cpu.c. */

typedef struct { /* pair p is row p / each of x with the matrices of expert ids[p]; it gives row p of y */
    const kv_weight *w; /* `n_weights` of expert e stand from w[e * apart] on */
    int64_t n_weights, apart, experts, pairs, each;
    const int64_t *order, *end; /* pairs expert by expert; end[e]: where those of expert e end */
    const float *x;
    int64_t k, ldx;
    float *y;
    int64_t ldy;
} kv_expert_products;

/* What `order` and `end` are for such ids: room for [pairs] and [experts + 1] is there. */
static void sort_pairs(const int64_t *ids, int64_t pairs, int64_t experts, int64_t *order, int64_t *end) {
    memset(end, 0, (experts + 1) * sizeof(int64_t));
    for (int64_t p = 0; p < pairs; p++) end[ids[p] + 1]++;
    for (int64_t e = 0; e < experts; e++) end[e + 1] += end[e];
    for (int64_t p = 0; p < pairs; p++) order[end[ids[p]]++] = p; /* end[e] was where e begins, and is where it ends */
}
