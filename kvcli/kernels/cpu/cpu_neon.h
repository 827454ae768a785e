/* What cpu_fixed.h computes by instructions of its own, for NEON: 4 weight rows are a vector, and a tile has all 16 of a group.
 * BYTES: bytes are multiplied, four at a time and one of four groups of columns to a lane of x (dot products); MATRIX: by
 * matrices of 2 by 8 bytes, too, where x has several rows. Else numbers of 16 bits are. */

INLINE fv NAME(madd)(fv a, fv b, fv c) { return (fv)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }

INLINE fv NAME(halves)(const uint8_t *p) { return (fv)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }

INLINE fv NAME(small)(const uint8_t *p, int is_signed) {
    uint16x4_t wide = vget_low_u16(vmovl_u8(vcreate_u8(read32(p))));
    if (!is_signed) return (fv)vcvtq_f32_u32(vmovl_u16(wide));
    return (fv)vcvtq_f32_s32(vmovl_s16(vshr_n_s16(vshl_n_s16(vreinterpret_s16_u16(wide), 8), 8)));
}

/* Compilers would load for a whole block before they multiply, and save what there are no registers for. */
#if defined(__GNUC__) && !defined(__clang__)
#define IN_ORDER __attribute__((optimize("no-schedule-insns")))
#else
#define IN_ORDER
#endif
/* Codes for several rows are read from memory: all of them would not have room in registers beside the sums. */
#define IN_MEMORY(codes) __asm__("" : "+r"(codes) : : "memory")
#define READ_AGAIN(x) __asm__("" : "+r"(x)) /* and so is x, for each two sides */

#if BYTES
#define CODES 8
#if MATRIX
#define DOT(sum, codes, x, lane) vusdotq_laneq_s32(sum, (uint8x16_t)(codes), x, lane)
#else
#define DOT(sum, codes, x, lane) vdotq_laneq_s32(sum, (int8x16_t)(codes), x, lane)
#endif

/* Codes as products want them: where bytes have signs, codes of 8 bits less 128; for matrices 8 columns of two rows. */
INLINE void NAME(widen)(const qv *u, int offset, int tile, qv *out) {
    for (int j = 0; j < 8; j += 2) {
        qv first = u[j], second = u[j + 1];
#if MATRIX
        (void)offset;
        if (tile > 1) {
            uint32x4_t a = (uint32x4_t)first, b = (uint32x4_t)second;
            first = (qv)vzip1q_u32(a, b), second = (qv)vzip2q_u32(a, b);
        }
#else
        (void)tile;
        if (offset == 128) first ^= 0x80, second ^= 0x80;
#endif
        out[j] = first, out[j + 1] = second;
    }
}

/* Adds to the sums of a side eight columns of codes times both bytes of a row. sums[0] is of the high bytes, sums[1] of the low
 * ones; in matrices each is of two weight rows, of high, low, high, low bytes. */
INLINE void NAME(products)(int32x4_t *sums, const qv *codes, int8x16_t both, int matrix) {
#if MATRIX
    if (matrix) {
        for (int i = 0; i < 2; i++) sums[i] = vusmmlaq_s32(sums[i], (uint8x16_t)codes[i], both);
        return;
    }
#endif
    (void)matrix;
    sums[0] = DOT(sums[0], codes[0], both, 0), sums[1] = DOT(sums[1], codes[0], both, 2);
    sums[0] = DOT(sums[0], codes[1], both, 1), sums[1] = DOT(sums[1], codes[1], both, 3);
}

INLINE int32x4_t NAME(joined)(int32x4_t first, int32x4_t second, int matrix) {
    const int32x4_t places = {7, 0, 7, 0};
    if (matrix) return vpaddq_s32(vshlq_s32(first, places), vshlq_s32(second, places));
    return vaddq_s32(vshlq_n_s32(first, 7), second);
}

/* Minus `offset` times the sum of the multiples of the j-th to the last of eight times four columns, as far as the codes have
 * it. */
INLINE int32x4_t NAME(start)(const kv_fixed *x, int j, int end, int offset) {
    int32_t first = x->less_first, all = x->less;
    if (!offset || (!MATRIX && offset == 128)) return vdupq_n_s32(0);
    return vdupq_n_s32((end == 4 ? first : j ? all - first : all) * offset);
}

/* sums[r][side] = codes, each less `offset`, times the multiples of row r, over the j-th to the last of eight times four columns.
 * Two sides at a time: with high and low bytes apart as many sums as there is room for. */
INLINE void NAME(sums)(qv (*u)[CODES], const kv_fixed *x, int j, int end, int offset, iv (*sums)[AT_ONCE], int rows) {
    if (rows > 1) IN_MEMORY(u);
    UNROLL for (int s = 0; s < AT_ONCE; s += 2) {
        int32x4_t acc[TILE][4];
        if (rows > 1) READ_AGAIN(x);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < 4; c++) acc[r][c] = vdupq_n_s32(0);
        UNROLL for (int i = j; i < end; i += 2) {
            qv codes[4] = {u[s][i], u[s][i + 1], u[s + 1][i], u[s + 1][i + 1]};
            UNROLL for (int r = 0; r < rows; r++) {
                int8x16_t both = vld1q_s8(x[r].eights[i / 2]);
                UNROLL for (int c = 0; c < 4; c += 2) NAME(products)(acc[r] + c, codes + c, both, MATRIX && rows > 1);
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < 2; c++) {
                int32x4_t sum = NAME(joined)(acc[r][2 * c], acc[r][2 * c + 1], MATRIX && rows > 1);
                sums[r][s + c] = (iv)(offset ? vaddq_s32(sum, NAME(start)(x + r, j, end, offset)) : sum);
            }
    }
}
#undef DOT
#else
#define CODES 16

/* 16 bits with a sign: columns 0 and 2 of four, then 1 and 3. */
INLINE void NAME(widen)(const qv *u, int offset, int tile, qv *out) {
    const uint16x8_t less = vdupq_n_u16((uint16_t)offset);
    (void)tile;
    for (int j = 0; j < 8; j++) {
        uint16x8_t two = (uint16x8_t)u[j], even = vandq_u16(two, vdupq_n_u16(255)), odd = vshrq_n_u16(two, 8);
        out[2 * j] = (qv)(offset ? vsubq_u16(even, less) : even), out[2 * j + 1] = (qv)(offset ? vsubq_u16(odd, less) : odd);
    }
}

/* As above; sums of two weight rows, of two kinds of columns each, are a vector. The codes are without `offset`. */
INLINE void NAME(sums)(qv (*u)[CODES], const kv_fixed *x, int j, int end, int offset, iv (*sums)[AT_ONCE], int rows) {
    (void)offset;
    IN_MEMORY(u);
    UNROLL for (int s = 0; s < AT_ONCE; s += 2) {
        int32x4_t acc[TILE][4];
        READ_AGAIN(x);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < 4; c++) acc[r][c] = vdupq_n_s32(0);
        UNROLL for (int i = 2 * j; i < 2 * end; i++) {
            int16x8_t codes[2] = {(int16x8_t)u[s][i], (int16x8_t)u[s + 1][i]};
            UNROLL for (int r = 0; r < rows; r++) {
                int16x8_t two = vreinterpretq_s16_u32(vdupq_n_u32(read32(x[r].pairs + 2 * i)));
                UNROLL for (int c = 0; c < 4; c += 2) {
                    acc[r][c] = vmlal_s16(acc[r][c], vget_low_s16(codes[c / 2]), vget_low_s16(two));
                    acc[r][c + 1] = vmlal_high_s16(acc[r][c + 1], codes[c / 2], two);
                }
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < 2; c++) sums[r][s + c] = (iv)vpaddq_s32(acc[r][2 * c], acc[r][2 * c + 1]);
    }
}
#endif
