/* Scales of small blocks of weights: the search of kquants.py, which says what each value is.

   Sums are those of a weighted least-squares fit. Blocks do not depend on each other. */

#include <math.h>
#include <stdint.h>

#define MOST 32  /* elements of a block */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_CPU
#endif

#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))

/* x: blocks of N, a constant. */
static inline __attribute__((always_inline)) void fit_shifted(
    const int N, const float *x, int64_t blocks, float top, float first, int64_t steps, float *scale, float *low)
{
    for (int64_t b = 0; b < blocks; b++, x += N) {
        float squares = 0, least = 0, most = 0, w[MOST], best = INFINITY;
        for (int i = 0; i < N; i++) {
            squares += x[i] * x[i];
            least = SMALLER(least, x[i]);
            most = LARGER(most, x[i]);
        }
        float rms = sqrtf(squares / N);
        for (int i = 0; i < N; i++)
            w[i] = rms + fabsf(x[i]);
        scale[b] = 0;
        low[b] = -least;
        if (most == least)
            continue;
        for (int64_t step = 0; step < steps; step++) {
            float inverse = (top + first + 0.1f * step) / (most - least), q[MOST];
            float sw = 0, swx = 0, swq = 0, swqq = 0, swqx = 0, error = 0;
            for (int i = 0; i < N; i++) {
                float code = rintf((x[i] - least) * inverse);
                code = LARGER(code, 0);
                q[i] = SMALLER(code, top);
                sw += w[i];
                swx += w[i] * x[i];
                swq += w[i] * q[i];
                swqq += w[i] * q[i] * q[i];
                swqx += w[i] * q[i] * x[i];
            }
            float det = sw * swqq - swq * swq, s = (most - least) / top, m = least;
            if (det > 0) {
                s = (sw * swqx - swx * swq) / det;
                m = (swqq * swx - swq * swqx) / det;
            }
            if (m > 0) {
                m = 0;
                s = swqx / swqq;
            }
            for (int i = 0; i < N; i++) {
                float d = s * q[i] + m - x[i];
                error += w[i] * d * d;
            }
            if (error < best) {
                best = error;
                scale[b] = s;
                low[b] = -m;
            }
        }
    }
}

/* x: blocks of `width`, 16 or 32. Sets scale and low so that x is about scale * q - low for whole q from 0 to top. */
EVERY_CPU void kv_fit_shifted(
    const float *x, int64_t blocks, int64_t width, float top, float first, int64_t steps, float *scale, float *low)
{
    if (width == 16)
        fit_shifted(16, x, blocks, top, first, steps, scale, low);
    else
        fit_shifted(MOST, x, blocks, top, first, steps, scale, low);
}

/* x: blocks of 16. Sets scale so that x is about scale * q for whole q from -top to top - 1. */
EVERY_CPU void kv_fit_signed(const float *x, int64_t blocks, float top, float *scale)
{
    enum { N = 16 };
    for (int64_t b = 0; b < blocks; b++, x += N) {
        float largest = 0, best = 0;
        for (int i = 0; i < N; i++)
            largest = fabsf(x[i]) > fabsf(largest) ? x[i] : largest;
        scale[b] = 0;
        if (largest == 0)
            continue;
        for (int step = -9; step <= 9; step++) {
            float inverse = -(top + 0.1f * step) / largest, swqx = 0, swqq = 0;
            for (int i = 0; i < N; i++) {
                float q = rintf(x[i] * inverse), w = x[i] * x[i];
                q = LARGER(q, -top);
                q = SMALLER(q, top - 1);
                swqx += w * q * x[i];
                swqq += w * q * q;
            }
            if (swqq > 0 && swqx * swqx > best * swqq) {  /* what is left of the error is the smaller for it */
                best = swqx * swqx / swqq;
                scale[b] = swqx / swqq;
            }
        }
    }
}
