/* Normalisation and rotation: one pass over their rows each, in float32, rounded once at the end. */
#include "common.h"

#define ROWS_PER_SHARE 32 /* fewer take less time than another thread needs to begin */

typedef struct {
    const void *x;
    long ld_x;
    int x_dtype;
    const float *weight;
    float eps;
    void *y;
    long ld_y;
    int y_dtype;
    long per_row, n;
} norm_job;

static void norm_rows(const void *argument, long begin, long end) {
    norm_job j = *(const norm_job *)argument;
    for (long vector = begin * j.per_row; vector < end * j.per_row; vector++) {
        long row = vector / j.per_row, inside = vector % j.per_row * j.n;
        long from = row * j.ld_x + inside, to = row * j.ld_y + inside;
        __m512 square = _mm512_setzero_ps();
        for (long i = 0; i < j.n; i += 16) {
            __m512 v = load16_masked(j.x, from + i, j.x_dtype, tail_mask(j.n - i));
            square = _mm512_fmadd_ps(v, v, square);
        }
        __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(square) / j.n + j.eps));
        for (long i = 0; i < j.n; i += 16) {
            __mmask16 mask = tail_mask(j.n - i);
            __m512 v = _mm512_mul_ps(load16_masked(j.x, from + i, j.x_dtype, mask), scale);
            v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, j.weight + i));
            store16_masked(j.y, to + i, j.y_dtype, mask, v);
        }
    }
}

/* y = x / sqrt(mean(x^2) + eps) * weight over vectors of n elements. There are rows * per_row vectors: those of a row lie
 * side by side, rows start ld elements apart. x and y may be the same memory; weight: float32 [n]. */
void baton_rms_norm(const void *x, long ld_x, int x_dtype, const float *weight, float eps, void *y, long ld_y,
                    int y_dtype, long rows, long per_row, long n) {
    norm_job job = {x, ld_x, x_dtype, weight, eps, y, ld_y, y_dtype, per_row, n};
    do_parallel(norm_rows, &job, rows, ROWS_PER_SHARE);
}

typedef struct {
    void *x;
    long ld_x;
    int dtype;
    const float *cos, *sin;
    long heads, dim;
} rotate_job;

static void rotate_rows(const void *argument, long begin, long end) {
    rotate_job j = *(const rotate_job *)argument;
    long half = j.dim / 2;
    for (long row = begin; row < end; row++)
        for (long head = 0; head < j.heads; head++) {
            long low = row * j.ld_x + head * j.dim, high = low + half;
            for (long i = 0; i < half; i += 16) {
                __mmask16 mask = tail_mask(half - i);
                __m512 a = load16_masked(j.x, low + i, j.dtype, mask), b = load16_masked(j.x, high + i, j.dtype, mask);
                __m512 c = _mm512_maskz_loadu_ps(mask, j.cos + row * half + i);
                __m512 s = _mm512_maskz_loadu_ps(mask, j.sin + row * half + i);
                store16_masked(j.x, low + i, j.dtype, mask, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
                store16_masked(j.x, high + i, j.dtype, mask, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
            }
        }
}

/* Rotates the first `heads` heads of every row of x [rows, >= heads, dim] in place: pairs (i, i + dim / 2) by the row's
 * angles. cos, sin: float32 [rows, dim / 2]. */
void baton_rotate(void *x, long ld_x, int dtype, const float *cos, const float *sin, long rows, long heads, long dim) {
    rotate_job job = {x, ld_x, dtype, cos, sin, heads, dim};
    do_parallel(rotate_rows, &job, rows, ROWS_PER_SHARE);
}
