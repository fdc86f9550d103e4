/* Products with a packed weight: y = x W^T, with what follows it done on the accumulators.
 *
 * Weight layout. The outputs are taken 32 at a time; each such pair of 16 is stored contiguously, in the order in which
 * the product reads it, so that a decode step is one forward sweep over memory:
 *   bfloat16  [pair][k / 32][2][16][16][2]   two AMX tiles (16 pairs of k by 16 outputs) side by side
 *   float32   [pair][k][2][16]               two vectors of 16 outputs per k
 * Rows and columns are padded with zeros to multiples of 32. For a gated product (SwiGLU) the first 16 of a pair belong
 * to the gate and the second 16 to the up projection, so that silu(gate) * up is formed before anything is stored.
 *
 * Traffic. Up to about 16 rows the weight is read once from memory and that is the time: bytes / bandwidth. With more
 * rows the product becomes bound by arithmetic; a pair of outputs stays in the first-level cache while all rows pass.
 * Every output is summed over k in one fixed order, so a row's result does not depend on the number of rows.
 *
 * x is [rows, k] with a row stride. Threads share out the pairs.
 */
#include "products.h"

enum { STORE = 0, ADD = 1, GATED = 2 };

typedef struct {
    void *out; /* [rows, n] with row stride ld_out; n counts outputs (for GATED: half the weight's) */
    long ld_out, n;
    int dtype; /* of out; ADD: float32 */
    int mode;
    const float *bias; /* [2 * padded pairs * 16] in the weight's order, or NULL */
} epilogue;

/* Finish outputs `column`.. of one row: a and b are the sums of the two halves of pair `pair`. */
static inline void finish(const epilogue *e, long row, long pair, __m512 a, __m512 b) {
    if (e->bias != NULL) {
        a = _mm512_add_ps(a, _mm512_loadu_ps(e->bias + pair * 32));
        b = _mm512_add_ps(b, _mm512_loadu_ps(e->bias + pair * 32 + 16));
    }
    if (e->mode == GATED) {
        long column = pair * 16, left = e->n - column;
        store16_masked(e->out, row * e->ld_out + column, e->dtype, tail_mask(left), _mm512_mul_ps(silu16(a), b));
        return;
    }
    long column = pair * 32, left = e->n - column, at = row * e->ld_out + column;
    __mmask16 mask_a = tail_mask(left), mask_b = left > 16 ? tail_mask(left - 16) : 0;
    if (e->mode == ADD) {
        float *out = (float *)e->out + at;
        a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(mask_a, out));
        b = _mm512_add_ps(b, _mm512_maskz_loadu_ps(mask_b, out + 16));
    }
    store16_masked(e->out, at, e->dtype, mask_a, a);
    if (mask_b) store16_masked(e->out, at + 16, e->dtype, mask_b, b);
}

/* `count` rows whose sums lie side by side, [count][32]. */
static void finish_rows(const epilogue *e, long row, long count, long pair, const float *sums) {
    for (long r = 0; r < count; r++)
        finish(e, row + r, pair, _mm512_load_ps(sums + r * 32), _mm512_load_ps(sums + r * 32 + 16));
}

/* ---- bfloat16 ---- */

typedef struct {
    epilogue e;
    const bf16 *x, *tail, *w; /* tail: copies of rows copied_from.. */
    long rows, copied_from, ld_x, k_tiles;
} bf16_job;

static void pairs_bf16(const void *argument, long begin, long end) {
    const bf16_job *j = argument;
    float sums[32 * 32] __attribute__((aligned(64)));
    configure_tiles();
    for (long pair = begin; pair < end; pair++) {
        const bf16 *weight = j->w + pair * j->k_tiles * 1024;
        for (long row = 0; row < j->rows;) {
            int in_tail = row >= j->copied_from;
            long stride = in_tail ? j->k_tiles * 32 : j->ld_x, left = (in_tail ? j->rows : j->copied_from) - row;
            const bf16 *from = in_tail ? j->tail + (row - j->copied_from) * stride : j->x + row * stride;
            long count = left < 32 ? left : 32;
            product_bf16(from, stride, weight, j->k_tiles, count > 16, row == 0, 1, sums, 32);
            finish_rows(&j->e, row, count, pair, sums);
            row += count;
        }
    }
    _tile_release();
}

/* x: bfloat16 [rows, k]; w: packed; k_tiles: padded k / 32. Returns 0, or -1 without memory.
 * Rows are copied where the tiles would read past them: to a multiple of 16 rows and of 32 columns. */
int baton_linear_bf16(const bf16 *x, long rows, long k, long ld_x, const bf16 *w, long pairs, long k_tiles,
                      const float *bias, void *out, long ld_out, long n, int out_dtype, int mode) {
    static __thread scratch padded;
    long width = k_tiles * 32, copied_from = k == width ? rows / 16 * 16 : 0, copied = rows - copied_from;
    bf16 *tail = NULL;
    if (copied > 0) {
        size_t size = (size_t)((copied + 15) / 16 * 16) * width * 2;
        tail = scratch_of(&padded, size);
        if (tail == NULL) return -1;
        memset(tail, 0, size);
        for (long r = 0; r < copied; r++) memcpy(tail + r * width, x + (copied_from + r) * ld_x, k * 2);
    }
    bf16_job job = {{out, ld_out, n, out_dtype, mode, bias}, x, tail, w, rows, copied_from, ld_x, k_tiles};
    do_parallel(pairs_bf16, &job, pairs, even_share(pairs));
    return 0;
}

/* ---- float32 ---- */

#define PANELS_AT_ONCE 12 /* their rows stay in the second-level cache while all pairs pass */
#define K_BLOCK 768       /* of a weight pair: 96 KiB, which stay there too while the panels pass */

typedef struct {
    epilogue e;
    const float *x, *w;
    float *panel; /* [panels][k][PANEL] */
    long ld_x, k, rows, pairs, panels;
} f32_job;

static void pack_panels(const void *argument, long begin, long end) {
    const f32_job *j = argument;
    for (long p = begin; p < end; p++)
        for (long i = 0; i < j->k; i++)
            for (long r = 0; r < PANEL; r++)
                j->panel[(p * j->k + i) * PANEL + r] = j->x[(p * PANEL + r) * j->ld_x + i];
}

/* Item i is pair i % pairs of the i / pairs-th group of PANELS_AT_ONCE panels, the rows behind the panels last. */
static void pairs_f32(const void *argument, long begin, long end) {
    const f32_job *j = argument;
    float sums[PANELS_AT_ONCE * PANEL * 32] __attribute__((aligned(64)));
    for (long item = begin; item < end; item++) {
        long pair = item % j->pairs, top = item / j->pairs * PANELS_AT_ONCE, panels = j->panels - top;
        const float *weight = j->w + pair * j->k * 32;
        if (panels <= 0) {
            for (long row = j->panels * PANEL; row < j->rows; row += PANEL) {
                int count = j->rows - row < PANEL ? (int)(j->rows - row) : PANEL;
                product_rows_f32(j->x + row * j->ld_x, j->ld_x, weight, j->k, count, 1, sums, 32);
                finish_rows(&j->e, row, count, pair, sums);
            }
            continue;
        }
        if (panels > PANELS_AT_ONCE) panels = PANELS_AT_ONCE;
        for (long from = 0; from < j->k; from += K_BLOCK) {
            long count = j->k - from < K_BLOCK ? j->k - from : K_BLOCK;
            for (long p = 0; p < panels; p++)
                product_f32(j->panel + ((top + p) * j->k + from) * PANEL, 1, PANEL, weight + from * 32, count, PANEL,
                            from == 0, sums + p * PANEL * 32, 32);
        }
        finish_rows(&j->e, top * PANEL, panels * PANEL, pair, sums);
    }
}

/* x: float32 [rows, k]; w: packed. Returns 0, or -1 without memory. From two panels on, rows are first transposed into
 * panels [k][PANEL], whose elements lie at constant distances: twelve row pointers would not fit the registers. */
int baton_linear_f32(const float *x, long rows, long k, long ld_x, const float *w, long pairs, const float *bias,
                     void *out, long ld_out, long n, int mode) {
    static __thread scratch packed;
    long panels = rows < 2 * PANEL ? 0 : rows / PANEL;
    float *panel = panels == 0 ? NULL : scratch_of(&packed, (size_t)panels * PANEL * k * sizeof(float));
    if (panels > 0 && panel == NULL) return -1;
    f32_job job = {{out, ld_out, n, FLOAT32, mode, bias}, x, w, panel, ld_x, k, rows, pairs, panels};
    do_parallel(pack_panels, &job, panels, even_share(panels));
    long groups = (panels + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE + (rows > panels * PANEL);
    do_parallel(pairs_f32, &job, pairs * groups, even_share(pairs));
    return 0;
}
