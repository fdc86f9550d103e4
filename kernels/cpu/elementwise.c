/* Normalisation and rotation: one pass over their rows each, in float32, rounded once at the end. */
#include "common.h"

#define PARALLEL_FROM 64 /* rows: fewer take less time than waking a second thread */

/* y = x / sqrt(mean(x^2) + eps) * weight over vectors of n elements. There are rows * per_row vectors: those of a row lie
 * side by side, rows start ld elements apart. x and y may be the same memory; weight: float32 [n]. */
void baton_rms_norm(const void *x, long ld_x, int x_dtype, const float *weight, float eps, void *y, long ld_y,
                    int y_dtype, long rows, long per_row, long n) {
#pragma omp parallel for schedule(static) if (rows >= PARALLEL_FROM)
    for (long vector = 0; vector < rows * per_row; vector++) {
        long from = vector / per_row * ld_x + vector % per_row * n, to = vector / per_row * ld_y + vector % per_row * n;
        __m512 square = _mm512_setzero_ps();
        for (long i = 0; i < n; i += 16) {
            __m512 v = load16_masked(x, from + i, x_dtype, tail_mask(n - i));
            square = _mm512_fmadd_ps(v, v, square);
        }
        __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(square) / n + eps));
        for (long i = 0; i < n; i += 16) {
            __mmask16 mask = tail_mask(n - i);
            __m512 v = _mm512_mul_ps(load16_masked(x, from + i, x_dtype, mask), scale);
            store16_masked(y, to + i, y_dtype, mask, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight + i)));
        }
    }
}

/* Rotates the first `heads` heads of every row of x [rows, >= heads, dim] in place: pairs (i, i + dim / 2) by the row's
 * angles. cos, sin: float32 [rows, dim / 2]. */
void baton_rotate(void *x, long ld_x, int dtype, const float *cos, const float *sin, long rows, long heads, long dim) {
    long half = dim / 2;
#pragma omp parallel for schedule(static) if (rows >= PARALLEL_FROM)
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < heads; head++) {
            long low = row * ld_x + head * dim, high = low + half;
            for (long i = 0; i < half; i += 16) {
                __mmask16 mask = tail_mask(half - i);
                __m512 a = load16_masked(x, low + i, dtype, mask), b = load16_masked(x, high + i, dtype, mask);
                __m512 c = _mm512_maskz_loadu_ps(mask, cos + row * half + i);
                __m512 s = _mm512_maskz_loadu_ps(mask, sin + row * half + i);
                store16_masked(x, low + i, dtype, mask, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
                store16_masked(x, high + i, dtype, mask, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
            }
        }
}
