/* Decode attention straight from the paged pool: one query token per row, grouped-query heads, optional window.
 *
 * The pool of a layer is [num_blocks, 2, kv_heads, block_size, head_dim], so the keys of one block and head are
 * contiguous, and so are the values. Nothing is gathered or copied: per row and key head the kernel reads each key and
 * each value once, for all query heads that share them. The floor is those bytes: 2 * context * kv_heads * head_dim *
 * sizeof(dtype) per row.
 *
 * Work is cut into units of (row, key head, span of SPAN positions). A unit computes the scores of its span, their
 * maximum and exponentials, and the weighted sum of values, in float32; the spans of a row are merged in order
 * afterwards. Spans do not depend on the number of rows or threads, and neither does a row's result.
 */
#include "common.h"

#define SPAN 128
#define UNITS_PER_SHARE 3 /* fewer take less time than another thread needs to begin */
#define ROWS_PER_SHARE 16  /* of merging */
#define MAX_GROUP 16 /* query heads per key head; kernels/cpu/attention.py asks for no more */
#define MAX_DIM 256

typedef struct {
    const void *q; /* [rows, heads, head_dim], row stride ld_q */
    long ld_q;
    const void *pool;
    const int32_t *tables; /* [rows, table_width]: block of positions block_size * i .. */
    long table_width;
    const int64_t *first, *last; /* [rows]: positions attended, both included */
    long kv_heads, group, dim, block_size;
    float scale;
    int dtype;
} problem;

/* [2][kv_heads][block_size][dim] pieces: keys (kind 0) or values (kind 1) of a block's head. */
static inline const void *piece(const problem *p, long row, long position, long head, int kind) {
    long block = p->tables[row * p->table_width + position / p->block_size];
    long at = (((block * 2 + kind) * p->kv_heads + head) * p->block_size + position % p->block_size) * p->dim;
    return p->dtype == FLOAT32 ? (const void *)((const float *)p->pool + at)
                               : (const void *)((const bf16 *)p->pool + at);
}

/* Ask for one token's `bytes` ahead of their use: pieces of neighbouring blocks lie anywhere in the pool. */
static inline void prefetch_token(const void *piece_of_block, long at_bytes, long bytes) {
    for (long line = 0; line < bytes; line += 64)
        _mm_prefetch((const char *)piece_of_block + at_bytes + line, _MM_HINT_T0);
}

/* One unit: positions [begin, end) of one row and key head. Writes max[g], sum[g] and acc[g][dim] (not normalised). */
static inline __attribute__((always_inline)) void attend_span(const problem *p, const long row, const long head,
                                                              long begin, long end, float *max, float *sum,
                                                              float *acc, const int group, const int dtype) {
    float query[MAX_GROUP * MAX_DIM] __attribute__((aligned(64)));
    float scores[MAX_GROUP * SPAN] __attribute__((aligned(64)));
    const long dim = p->dim, count = end - begin, token_bytes = dim * (dtype == FLOAT32 ? 4 : 2);
    for (int g = 0; g < group; g++)
        for (long d = 0; d < dim; d += 16)
            _mm512_store_ps(query + g * dim + d,
                            _mm512_mul_ps(_mm512_set1_ps(p->scale),
                                          load16(p->q, row * p->ld_q + (head * group + g) * dim + d, dtype)));
    for (long t = 0; t < count;) {
        long stop = t + p->block_size - (begin + t) % p->block_size;
        if (stop > count) stop = count;
        const void *keys = piece(p, row, begin + t, head, 0), *values = piece(p, row, begin + t, head, 1);
        const void *next = stop < count ? piece(p, row, begin + stop, head, 0) : keys;
        for (long at = 0, ahead = 0; t < stop; t++, at += dim, ahead += token_bytes) {
            prefetch_token(values, ahead, token_bytes);
            prefetch_token(next, ahead, token_bytes);
            __m512 dot[MAX_GROUP];
            for (int g = 0; g < group; g++) dot[g] = _mm512_setzero_ps();
            for (long d = 0; d < dim; d += 16) {
                __m512 key = load16(keys, at + d, dtype);
                for (int g = 0; g < group; g++)
                    dot[g] = _mm512_fmadd_ps(key, _mm512_load_ps(query + g * dim + d), dot[g]);
            }
            for (int g = 0; g < group; g++) scores[g * SPAN + t] = _mm512_reduce_add_ps(dot[g]);
        }
    }
    for (int g = 0; g < group; g++) {
        float *s = scores + g * SPAN;
        for (long t = count; t % 16; t++) s[t] = -INFINITY;
        __m512 top = _mm512_load_ps(s);
        for (long t = 16; t < count; t += 16) top = _mm512_max_ps(top, _mm512_load_ps(s + t));
        max[g] = _mm512_reduce_max_ps(top);
        __m512 total = _mm512_setzero_ps();
        for (long t = 0; t < count; t += 16) {
            __m512 e = exp16(_mm512_sub_ps(_mm512_load_ps(s + t), _mm512_set1_ps(max[g])));
            _mm512_store_ps(s + t, e);
            total = _mm512_add_ps(total, e);
        }
        sum[g] = _mm512_reduce_add_ps(total);
    }
    for (long d = 0; d < dim; d += 16) {
        __m512 value[MAX_GROUP];
        for (int g = 0; g < group; g++) value[g] = _mm512_setzero_ps();
        for (long t = 0; t < count;) {
            long stop = t + p->block_size - (begin + t) % p->block_size;
            if (stop > count) stop = count;
            const void *values = piece(p, row, begin + t, head, 1);
            for (long at = d; t < stop; t++, at += dim) {
                __m512 v = load16(values, at, dtype);
                for (int g = 0; g < group; g++)
                    value[g] = _mm512_fmadd_ps(v, _mm512_set1_ps(scores[g * SPAN + t]), value[g]);
            }
        }
        for (int g = 0; g < group; g++) _mm512_store_ps(acc + g * dim + d, value[g]);
    }
}

static void attend_unit(const problem *p, long row, long head, long begin, long end, float *max, float *sum,
                        float *acc) {
    /* Constants for the common group sizes let the compiler keep a group in registers */
    switch (p->group * 2 + (p->dtype == BFLOAT16)) {
#define CASE(group)                                                                                   \
    case group * 2: attend_span(p, row, head, begin, end, max, sum, acc, group, FLOAT32); break;      \
    case group * 2 + 1: attend_span(p, row, head, begin, end, max, sum, acc, group, BFLOAT16); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
        default: attend_span(p, row, head, begin, end, max, sum, acc, (int)p->group, p->dtype);
    }
}

/* Merge the spans of one row and key head, whose parts lie `distance` floats apart, and store [group, head_dim]. */
static void merge_spans(const problem *p, long row, long head, const float *parts, long spans, long distance,
                        void *out, long ld_out) {
    for (long g = 0; g < p->group; g++) {
        float top = -INFINITY, total = 0;
        for (long s = 0; s < spans; s++)
            if (parts[s * distance + g] > top) top = parts[s * distance + g];
        float weight[spans];
        for (long s = 0; s < spans; s++) {
            weight[s] = _mm512_cvtss_f32(exp16(_mm512_set1_ps(parts[s * distance + g] - top)));
            total += weight[s] * parts[s * distance + MAX_GROUP + g];
        }
        for (long d = 0; d < p->dim; d += 16) {
            __m512 value = _mm512_setzero_ps();
            for (long s = 0; s < spans; s++)
                value = _mm512_fmadd_ps(_mm512_set1_ps(weight[s]),
                                        _mm512_load_ps(parts + s * distance + 2 * MAX_GROUP + g * p->dim + d), value);
            value = _mm512_div_ps(value, _mm512_set1_ps(total));
            store16(out, row * ld_out + (head * p->group + g) * p->dim + d, p->dtype, value);
        }
    }
}

typedef struct {
    problem p;
    const long *starts; /* [rows + 1]: first unit of each row */
    long rows, part_size;
    float *parts; /* one part per unit */
    void *out;
    long ld_out;
} decode_job;

static void attend_units(const void *argument, long begin_unit, long end_unit) {
    const decode_job *j = argument;
    const problem *p = &j->p;
    long row = 0;
    for (long unit = begin_unit; unit < end_unit; unit++) {
        while (j->starts[row + 1] <= unit) row++;
        long inside = unit - j->starts[row], head = inside % p->kv_heads; /* heads of a block are neighbours */
        long begin = (p->first[row] / SPAN + inside / p->kv_heads) * SPAN, end = begin + SPAN;
        if (begin < p->first[row]) begin = p->first[row];
        if (end > p->last[row] + 1) end = p->last[row] + 1;
        float *part = j->parts + unit * j->part_size;
        attend_unit(p, row, head, begin, end, part, part + MAX_GROUP, part + 2 * MAX_GROUP);
    }
}

static void merge_rows(const void *argument, long begin_row, long end_row) {
    const decode_job *j = argument;
    long heads = j->p.kv_heads;
    for (long row = begin_row; row < end_row; row++)
        for (long head = 0; head < heads; head++)
            merge_spans(&j->p, row, head, j->parts + (j->starts[row] + head) * j->part_size,
                        (j->starts[row + 1] - j->starts[row]) / heads, heads * j->part_size, j->out, j->ld_out);
}

/* q: [rows, kv_heads * group, dim]; out: [rows, kv_heads * group * dim]; window 0: none. last[row] is the position of
 * the row's token, whose key is in the pool. dim: a multiple of 16, at most MAX_DIM; group: at most MAX_GROUP.
 * Returns 0, or -1 without memory. */
int baton_decode_attention(const void *q, long ld_q, const void *pool, const int32_t *tables, long table_width,
                           const int64_t *last, long rows, long kv_heads, long group, long dim, long block_size,
                           long window, float scale, int dtype, void *out, long ld_out) {
    static __thread scratch memory, index;
    long part_size = 2 * MAX_GROUP + group * dim;
    long *starts = scratch_of(&index, (2 * rows + 1) * sizeof(int64_t));
    if (starts == NULL) return -1;
    int64_t *first = (int64_t *)(starts + rows + 1);
    starts[0] = 0;
    for (long row = 0; row < rows; row++) {
        first[row] = window > 0 && last[row] >= window ? last[row] - window + 1 : 0;
        starts[row + 1] = starts[row] + (last[row] / SPAN - first[row] / SPAN + 1) * kv_heads;
    }
    long units = starts[rows];
    float *parts = scratch_of(&memory, (size_t)units * part_size * sizeof(float));
    if (parts == NULL) return -1;
    decode_job job = {
        {q, ld_q, pool, tables, table_width, first, last, kv_heads, group, dim, block_size, scale, dtype},
        starts, rows, part_size, parts, out, ld_out,
    };
    long size = even_share(units);
    do_parallel(attend_units, &job, units, size < UNITS_PER_SHARE ? UNITS_PER_SHARE : size);
    do_parallel(merge_rows, &job, rows, ROWS_PER_SHARE);
    return 0;
}

typedef struct {
    const char *kv;
    long ld_kv;
    char *pool;
    const int64_t *blocks, *offsets;
    long kv_heads, block_size, dim_bytes;
} write_job;

static void write_tokens(const void *argument, long begin, long end) {
    write_job j = *(const write_job *)argument;
    for (long t = begin; t < end; t++)
        for (long piece = 0; piece < 2 * j.kv_heads; piece++) {
            long slot = (j.blocks[t] * 2 * j.kv_heads + piece) * j.block_size + j.offsets[t];
            memcpy(j.pool + slot * j.dim_bytes, j.kv + t * j.ld_kv + piece * j.dim_bytes, j.dim_bytes);
        }
}

/* Store keys and values kv [tokens, 2, kv_heads, dim] (token stride ld_kv) in slots blocks[t], offsets[t]. */
void baton_write_kv(const char *kv, long ld_kv_bytes, char *pool, const int64_t *blocks, const int64_t *offsets,
                    long tokens, long kv_heads, long block_size, long dim_bytes) {
    write_job job = {kv, ld_kv_bytes, pool, blocks, offsets, kv_heads, block_size, dim_bytes};
    do_parallel(write_tokens, &job, tokens, 64);
}
