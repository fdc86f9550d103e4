/* What the CPU kernels share: conversions between bfloat16 and float32, the exponential, and scratch memory.
 *
 * Every kernel needs AVX-512 with BF16; those that say so need AMX. kernels/cpu/library.py builds them only where the
 * processor has all of it.
 */
#ifndef BATON_CPU_COMMON_H
#define BATON_CPU_COMMON_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

typedef uint16_t bf16;

enum { FLOAT32 = 0, BFLOAT16 = 1 };

static inline __m512 load16(const void *base, long index, int dtype) {
    if (dtype == FLOAT32) return _mm512_loadu_ps((const float *)base + index);
    __m256i half = _mm256_loadu_si256((const __m256i *)((const bf16 *)base + index));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline __m512 load16_masked(const void *base, long index, int dtype, __mmask16 mask) {
    if (dtype == FLOAT32) return _mm512_maskz_loadu_ps(mask, (const float *)base + index);
    __m256i half = _mm256_maskz_loadu_epi16(mask, (const bf16 *)base + index);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline void store16_masked(void *base, long index, int dtype, __mmask16 mask, __m512 value) {
    if (dtype == FLOAT32)
        _mm512_mask_storeu_ps((float *)base + index, mask, value);
    else
        _mm256_mask_storeu_epi16((bf16 *)base + index, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

static inline void store16(void *base, long index, int dtype, __m512 value) {
    if (dtype == FLOAT32)
        _mm512_storeu_ps((float *)base + index, value);
    else
        _mm256_storeu_si256((__m256i *)((bf16 *)base + index), (__m256i)_mm512_cvtneps_pbh(value));
}

/* The lanes of the last, partial vector of n elements. */
static inline __mmask16 tail_mask(long n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }

/* e^x to 2 units in the last place: 2^n * p(r) with x = n ln 2 + r, |r| <= ln 2 / 2, and p the Taylor polynomial of
 * degree 7. Below -87.3 it is 0, so that minus infinity gives 0; NaN stays NaN, so that broken numbers show. */
static inline __m512 exp16(__m512 x) {
    __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33f), _CMP_NLE_UQ);
    x = _mm512_min_ps(_mm512_set1_ps(88.37f), x); /* in this order NaN passes */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x); /* ln 2 in two parts */
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(alive, p, n);
}

static inline __m512 silu16(__m512 x) {
    __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* Memory that a thread keeps from call to call, 64-byte aligned, contents undefined; NULL when there is none. */
typedef struct {
    void *memory;
    size_t size;
} scratch;

static inline void *scratch_of(scratch *s, size_t size) {
    if (s->size < size) {
        free(s->memory);
        s->size = (size + 4095) / 4096 * 4096;
        s->memory = aligned_alloc(64, s->size);
        if (s->memory == NULL) s->size = 0;
    }
    return s->memory;
}

#endif
