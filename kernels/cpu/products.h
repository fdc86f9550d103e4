/* The inner products: some rows of x by one pair (32 outputs) of a packed weight. linear.c describes the packing. */
#ifndef BATON_CPU_PRODUCTS_H
#define BATON_CPU_PRODUCTS_H

#include "common.h"

#define PREFETCH_AHEAD 4096 /* bytes; hides the latency of memory behind the products in between */

/* ---- bfloat16, AMX: 16 or 32 rows ---- */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Before a thread's first product_bf16; _tile_release() after its last. */
static inline void configure_tiles(void) {
    tile_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.rows[i] = 16;
        config.column_bytes[i] = 64;
    }
    _tile_loadconfig(&config);
}

static inline void prefetch_tile(const bf16 *tile) {
    const char *line = (const char *)tile + PREFETCH_AHEAD;
    for (int i = 0; i < 16; i++) _mm_prefetch(line + 64 * i, _MM_HINT_T0);
}

/* sums [16 or 32][32] += (from zero if `fresh`) 16 rows of x, or 32 if `two`, times the pair w, over k_tiles * 32
 * columns. `fetch`: the weight comes from memory rather than from a cache. */
static inline void product_bf16(const bf16 *x, long ld_x, const bf16 *w, long k_tiles, int two, int fetch, int fresh,
                                float *sums, long ld_sums) {
    float *low = sums + 16 * ld_sums;
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, ld_sums * 4);
        _tile_loadd(1, sums + 16, ld_sums * 4);
        if (two) {
            _tile_loadd(2, low, ld_sums * 4);
            _tile_loadd(3, low + 16, ld_sums * 4);
        }
    }
    for (long k = 0; k < k_tiles; k++, w += 1024) {
        if (fetch) {
            prefetch_tile(w);
            prefetch_tile(w + 512);
        }
        _tile_loadd(4, x + 32 * k, ld_x * 2);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + 16 * ld_x + 32 * k, ld_x * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, ld_sums * 4);
    _tile_stored(1, sums + 16, ld_sums * 4);
    if (two) {
        _tile_stored(2, low, ld_sums * 4);
        _tile_stored(3, low + 16, ld_sums * 4);
    }
}

/* ---- float32: up to PANEL rows ---- */

#define PANEL 12 /* 24 accumulators, 2 vectors of weight and 1 broadcast are what 32 registers hold */

/* sums [count][32] += (from zero if `fresh`) `count` rows of x times the pair w, over k columns in order. Element (r, i)
 * of x is x[r * row_step + i * k_step]. `count` and the steps of a packed panel are constants where this is inlined. */
static inline __attribute__((always_inline)) void product_f32(const float *x, const long row_step, const long k_step,
                                                              const float *w, long k, const int count, int fresh,
                                                              float *sums, long ld_sums) {
    __m512 a[PANEL], b[PANEL];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) {
        a[r] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * ld_sums);
        b[r] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * ld_sums + 16);
    }
    for (long i = 0; i < k; i++, w += 32, x += k_step) {
        __m512 w0 = _mm512_loadu_ps(w), w1 = _mm512_loadu_ps(w + 16);
        _mm_prefetch((const char *)w + PREFETCH_AHEAD / 2, _MM_HINT_T0);
        _mm_prefetch((const char *)w + PREFETCH_AHEAD / 2 + 64, _MM_HINT_T0);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            __m512 v = _mm512_set1_ps(x[r * row_step]);
            a[r] = _mm512_fmadd_ps(v, w0, a[r]);
            b[r] = _mm512_fmadd_ps(v, w1, b[r]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) {
        _mm512_store_ps(sums + r * ld_sums, a[r]);
        _mm512_store_ps(sums + r * ld_sums + 16, b[r]);
    }
}

/* The same for any `count` up to PANEL, of rows that lie ld_x apart. */
static inline void product_rows_f32(const float *x, long ld_x, const float *w, long k, int count, int fresh,
                                    float *sums, long ld_sums) {
    switch (count) {
#define CASE(count) \
    case count: product_f32(x, ld_x, 1, w, k, count, fresh, sums, ld_sums); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

#endif
