/* Arithmetic that gives the same bits on every processor: vectors of eight float32, sums in one order, an exp of our own.
 *
 * A product is added by fused multiply-add where `fused` or `add_product` say so and nowhere else (the compiler is told not
 * to contract). Without AVX2 the same is spelled out lane by lane: slow on x86, what the compiler makes of it on others.
 */
#ifndef WHALEPOD_VECTORS_H
#define WHALEPOD_VECTORS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__) && !defined(WHALEPOD_PLAIN)
typedef __m256 lanes;

INLINE lanes zeros(void) { return _mm256_setzero_ps(); }
INLINE lanes load(const float *at) { return _mm256_loadu_ps(at); }
INLINE lanes spread(float x) { return _mm256_set1_ps(x); }
INLINE lanes plus(lanes a, lanes b) { return _mm256_add_ps(a, b); }
INLINE lanes times(lanes a, lanes b) { return _mm256_mul_ps(a, b); }
INLINE lanes over(lanes a, lanes b) { return _mm256_div_ps(a, b); }
INLINE lanes not_negative(lanes a) { return _mm256_max_ps(a, _mm256_setzero_ps()); }
INLINE lanes fused(lanes a, lanes b, lanes c) { return _mm256_fmadd_ps(a, b, c); }
INLINE void store(float *at, lanes a) { _mm256_storeu_ps(at, a); }

INLINE __m128 folded(lanes a) { return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }

INLINE float sum(lanes a) {
    __m128 four = folded(a), two = _mm_add_ps(four, _mm_shuffle_ps(four, four, 0xF5));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehl_ps(two, two)));
}

/* `sum` of each of four. */
INLINE void sum_4(float *out, const lanes *a) {
    __m128 p = folded(a[0]), q = folded(a[1]), r = folded(a[2]), s = folded(a[3]);
    _MM_TRANSPOSE4_PS(p, q, r, s);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(p, q), _mm_add_ps(r, s)));
}
#else
typedef struct {
    float at[LANES];
} lanes;

#define EACH_LANE for (int i = 0; i < LANES; i++)

INLINE lanes spread(float x) { lanes a; EACH_LANE a.at[i] = x; return a; }
INLINE lanes zeros(void) { return spread(0); }
INLINE lanes load(const float *at) { lanes a; memcpy(a.at, at, sizeof a.at); return a; }
INLINE lanes plus(lanes a, lanes b) { EACH_LANE a.at[i] += b.at[i]; return a; }
INLINE lanes times(lanes a, lanes b) { EACH_LANE a.at[i] *= b.at[i]; return a; }
INLINE lanes over(lanes a, lanes b) { EACH_LANE a.at[i] /= b.at[i]; return a; }
INLINE lanes not_negative(lanes a) { EACH_LANE a.at[i] = a.at[i] > 0 ? a.at[i] : 0; return a; }
INLINE lanes fused(lanes a, lanes b, lanes c) { EACH_LANE c.at[i] = __builtin_fmaf(a.at[i], b.at[i], c.at[i]); return c; }
INLINE void store(float *at, lanes a) { memcpy(at, a.at, sizeof a.at); }

INLINE float sum(lanes a) {
    for (int i = 0; i < 4; i++) a.at[i] += a.at[i + 4];
    return (a.at[0] + a.at[1]) + (a.at[2] + a.at[3]);
}

INLINE void sum_4(float *out, const lanes *a) {
    for (int i = 0; i < 4; i++) out[i] = sum(a[i]);
}
#endif

/* The last `count` < 8 numbers of a row, then zeros. */
INLINE lanes load_some(const float *at, int64_t count) {
    float padded[LANES] = {0};
    for (int64_t i = 0; i < count; i++) padded[i] = at[i];
    return load(padded);
}

/* Sums of products take sixteen lanes from the left, as two vectors that are added before they are folded. */
INLINE float dot(const float *a, const float *b, int64_t width) {
    lanes low = zeros(), high = zeros();
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        low = fused(load(a + i), load(b + i), low);
        high = fused(load(a + i + LANES), load(b + i + LANES), high);
    }
    if (i + LANES <= width) {
        low = fused(load(a + i), load(b + i), low);
        i += LANES;
        if (i < width) high = fused(load_some(a + i, width - i), load_some(b + i, width - i), high);
    } else if (i < width)
        low = fused(load_some(a + i, width - i), load_some(b + i, width - i), low);
    return sum(plus(low, high));
}

/* a · b + c, rounded once. */
INLINE float add_product(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

INLINE float root(float x) { return __builtin_sqrtf(x); }
INLINE float larger(float a, float b) { return a > b ? a : b; }
INLINE float smaller(float a, float b) { return a < b ? a : b; }

/* The mean and its root in double: one rounding that all channels of a row share. */
INLINE float inverse_rms(const float *x, int64_t width, float eps) {
    return (float)(1.0 / __builtin_sqrt((double)dot(x, x, width) / (double)width + (double)eps));
}

INLINE uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, sizeof bits); return bits; }
INLINE float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, sizeof x); return x; }

#define ROUNDER 12582912.0f /* 1.5 · 2^23: adding it leaves no place for fractions */

/* e^x within 2 units in the last place, for -87 <= x <= 88; beyond, e^-87 or e^88. */
INLINE float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = add_product(x, 1.44269504f, ROUNDER) - ROUNDER;
    float r = add_product(n, 2.12194440e-4f, add_product(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = add_product(p, r, 1.3981999507e-3f);
    p = add_product(p, r, 8.3334519073e-3f);
    p = add_product(p, r, 4.1665795894e-2f);
    p = add_product(p, r, 1.6666665459e-1f);
    p = add_product(p, r, 5.0000001201e-1f);
    p = add_product(p, r * r, r) + 1.0f;
    return p * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

INLINE float sigmoid(float x) { return 1.0f / (exponential(-x) + 1.0f); }

/* log(1 + e^x): of y = e^-|x| the series of log(1 + y) = 2 artanh(y / (2 + y)). */
INLINE float softplus(float x) {
    float y = exponential(x > 0 ? -x : x), s = y / (2.0f + y), q = s * s;
    float p = 1.0f / 15;
    p = add_product(p, q, 1.0f / 13);
    p = add_product(p, q, 1.0f / 11);
    p = add_product(p, q, 1.0f / 9);
    p = add_product(p, q, 1.0f / 7);
    p = add_product(p, q, 1.0f / 5);
    p = add_product(p, q, 1.0f / 3);
    p = add_product(p, q, 1.0f);
    return 2.0f * s * p + (x > 0 ? x : 0);
}
#endif
