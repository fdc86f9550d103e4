/* Attention of prompt chunks over the paged pool: many query tokens per row, grouped-query heads, optional window.
 *
 * Keys and values of a row, those of the chunk included, are first packed per key head in the layouts of linear.c, so
 * that both products of attention are the ones of the linear layers:
 *   scores = queries x keys'    a weight of one output per key, summed over head_dim
 *   output = weights x values   a weight of one output per dimension, summed over keys
 * Packing reads the keys and values once. Then every block of QUERIES (token, query head) rows of one key head runs on
 * its own: over KEYS keys at a time, scores, the running maximum and sum of each row, exponentials, and the product with
 * the values, all in float32 but for the operands of bfloat16 products. Keys after a block's last token, and before its
 * window, are not computed.
 *
 * The order of summation over keys is that of their positions, without a window in steps of KEYS from position 0, so a
 * token's result depends neither on how its prompt was cut into chunks nor on the other rows.
 *
 * Arithmetic: 4 * head_dim per visible (query head, key); 0.3 GFLOP per layer for 512 tokens of 9 heads of 64.
 */
#include "products.h"

#define QUERIES 32
#define KEYS 256
#define TILE 32 /* keys packed together */
#define MAX_DIM 256

typedef struct {
    long start, length, first_token; /* tokens before the chunk; of it; index of its first in q and out */
    long base, tiles;                /* position of the first packed key, a multiple of TILE; tiles packed */
    long packed;                     /* where they begin, in tiles of one head, all heads of earlier rows before */
    long blocks;                     /* query blocks of earlier rows, all heads */
} chunk;

typedef struct {
    const void *q, *pool;
    long ld_q;
    const int32_t *tables; /* [rows, table_width] */
    long table_width, rows, kv_heads, group, dim, block_size, window;
    float scale;
    int dtype;
    void *out;
    long ld_out;
    const chunk *chunks; /* [rows + 1]: the last one holds the totals */
    char *keys, *values; /* packed */
    long key_tile, value_tile; /* bytes of one tile of one head */
} prefill_job;

static long rounded_up(long value, long unit) { return (value + unit - 1) / unit * unit; }

/* The key (kind 0) or value (kind 1) of a position, dim elements. */
static const char *vector_of(const prefill_job *j, long row, long position, long head, int kind) {
    long block = j->tables[row * j->table_width + position / j->block_size];
    long at = (((block * 2 + kind) * j->kv_heads + head) * j->block_size + position % j->block_size) * j->dim;
    return (const char *)j->pool + at * (j->dtype == FLOAT32 ? 4 : 2);
}

/* Packed values of a head: [dim / 32][tiles][one tile of 32 dimensions]; keys: [tiles][one tile of all dimensions]. */
static void pack_tile(const prefill_job *j, long row, long head, long tile) {
    const chunk *c = j->chunks + row;
    long before = c->packed * j->kv_heads + head * c->tiles, end = c->start + c->length, dim = j->dim;
    long pairs = rounded_up(dim, 32) / 32, piece = j->value_tile / pairs;
    char *key = j->keys + (before + tile) * j->key_tile;
    char *value = j->values + before * j->value_tile; /* of the head's first tile */
    const char *k[TILE], *v[TILE];
    long count = end - (c->base + tile * TILE);
    if (count > TILE) count = TILE;
    for (long i = 0; i < count; i++) {
        k[i] = vector_of(j, row, c->base + tile * TILE + i, head, 0);
        v[i] = vector_of(j, row, c->base + tile * TILE + i, head, 1);
    }
    if (j->dtype == FLOAT32) {
        if (count < TILE) memset(key, 0, j->key_tile);
        for (long i = 0; i < count; i++)
            for (long d = 0; d < dim; d++) ((float *)key)[d * 32 + i] = ((const float *)k[i])[d];
        for (long pair = 0; pair < pairs; pair++) {
            float *to = (float *)(value + (pair * c->tiles + tile) * piece);
            for (long i = 0; i < TILE; i++)
                for (long d = 0; d < 32; d += 16) {
                    __mmask16 mask = i < count && pair * 32 + d < dim ? 0xffff : 0;
                    const float *from = (const float *)v[mask ? i : 0] + (mask ? pair * 32 + d : 0);
                    _mm512_store_ps(to + i * 32 + d, _mm512_maskz_loadu_ps(mask, from));
                }
        }
        return;
    }
    if (count < TILE || dim % 32) memset(key, 0, j->key_tile);
    for (long i = 0; i < count; i++) { /* pairs of dimensions are the units: [dim / 32][2][16 pairs][16 keys] */
        uint32_t *to = (uint32_t *)key + i / 16 * 256 + i % 16;
        const uint32_t *from = (const uint32_t *)k[i];
        for (long p = 0; p < dim / 2; p++) to[p / 16 * 512 + p % 16 * 16] = from[p];
    }
    for (long pair = 0; pair < pairs; pair++) { /* pairs of keys: [2][16 pairs][16 dimensions][2] */
        uint32_t *to = (uint32_t *)(value + (pair * c->tiles + tile) * piece);
        for (long half = 0; half < 2; half++)
            for (long p = 0; p < 16; p++) {
                long d = pair * 32 + half * 16;
                __m512i even = _mm512_setzero_si512(), odd = even;
                if (d < dim && 2 * p < count)
                    even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)((const bf16 *)v[2 * p] + d)));
                if (d < dim && 2 * p + 1 < count)
                    odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)((const bf16 *)v[2 * p + 1] + d)));
                _mm512_store_si512(to + half * 256 + p * 16, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
            }
    }
}

static void pack_tiles(const void *argument, long begin, long end) {
    const prefill_job *j = argument;
    long row = 0;
    for (long item = begin; item < end; item++) {
        while (j->chunks[row + 1].packed * j->kv_heads <= item) row++;
        long inside = item - j->chunks[row].packed * j->kv_heads;
        pack_tile(j, row, inside % j->kv_heads, inside / j->kv_heads);
    }
}

typedef struct {
    float scores[QUERIES * KEYS], output[QUERIES * MAX_DIM], top[QUERIES], sum[QUERIES];
    char query[QUERIES * MAX_DIM * 4], weights[QUERIES * KEYS * 4];
} workspace;

/* One row's scores of `count` keys from position `position` on become weights; the output so far is scaled to match.
 * Visible are the positions from `first` to `last`. */
static void weigh(workspace *w, long r, long position, long count, long first, long last, long width, float scale,
                  int dtype) {
    float *s = w->scores + r * KEYS;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low = _mm512_set1_epi32((int)(first - position)), high = _mm512_set1_epi32((int)(last - position));
    __m512 top = _mm512_set1_ps(w->top[r]), total = _mm512_setzero_ps();
    for (long i = 0; i < count; i += 16) {
        __m512i key = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)i));
        __mmask16 seen = _mm512_cmpge_epi32_mask(key, low) & _mm512_cmple_epi32_mask(key, high);
        __m512 v = _mm512_mul_ps(_mm512_load_ps(s + i), _mm512_set1_ps(scale));
        v = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, v);
        _mm512_store_ps(s + i, v);
        top = _mm512_max_ps(top, v);
    }
    float best = _mm512_reduce_max_ps(top), shift = best == -INFINITY ? 0.0f : best; /* nothing seen yet: all weights 0 */
    for (long i = 0; i < count; i += 16) {
        __m512 e = exp16(_mm512_sub_ps(_mm512_load_ps(s + i), _mm512_set1_ps(shift)));
        total = _mm512_add_ps(total, e);
        store16(w->weights, r * KEYS + i, dtype, e);
    }
    float fade = _mm512_cvtss_f32(exp16(_mm512_set1_ps(w->top[r] - shift)));
    w->sum[r] = w->sum[r] * fade + _mm512_reduce_add_ps(total);
    w->top[r] = best;
    if (fade != 1.0f)
        for (long d = 0; d < width; d += 16) {
            float *o = w->output + r * width + d;
            _mm512_store_ps(o, _mm512_mul_ps(_mm512_load_ps(o), _mm512_set1_ps(fade)));
        }
}

/* rows x one pair of a packed weight, in either type. x: [QUERIES][ld_x], in the type's width. */
static void product(const prefill_job *j, const void *x, long ld_x, const char *w, long k, long rows, int fresh,
                    float *sums, long ld_sums) {
    if (j->dtype == BFLOAT16) {
        product_bf16(x, ld_x, (const bf16 *)w, k / 32, rows > 16, 0, fresh, sums, ld_sums);
        return;
    }
    for (long r = 0; r < rows; r += PANEL)
        product_rows_f32((const float *)x + r * ld_x, ld_x, (const float *)w, k,
                         rows - r < PANEL ? (int)(rows - r) : PANEL, fresh, sums + r * ld_sums, ld_sums);
}

/* Query block `block` of one row and key head: rows are (token, query head of the group), token by token. */
static void attend_block(const prefill_job *j, long row, long head, long block, workspace *w) {
    const chunk *c = j->chunks + row;
    long dim = j->dim, width = rounded_up(dim, 32), group = j->group, size = j->dtype == FLOAT32 ? 4 : 2;
    long rows = c->length * group - block * QUERIES;
    if (rows > QUERIES) rows = QUERIES;
    long first_token = block * QUERIES / group, last_token = (block * QUERIES + rows - 1) / group;
    memset(w->query, 0, QUERIES * width * size);
    memset(w->output, 0, QUERIES * width * sizeof(float));
    memset(w->weights, 0, QUERIES * KEYS * size); /* rows that do not exist */
    for (long r = 0; r < rows; r++) {
        long token = (block * QUERIES + r) / group, g = (block * QUERIES + r) % group;
        long at = (c->first_token + token) * j->ld_q + (head * group + g) * dim;
        memcpy(w->query + r * width * size, (const char *)j->q + at * size, dim * size);
        w->top[r] = -INFINITY;
        w->sum[r] = 0.0f;
    }
    long before = c->packed * j->kv_heads + head * c->tiles, pairs = width / 32, piece = j->value_tile / pairs;
    const char *keys = j->keys + before * j->key_tile, *values = j->values + before * j->value_tile;
    long first_seen = j->window > 0 ? c->start + first_token - j->window + 1 : 0;
    long tile = first_seen > c->base ? (first_seen - c->base) / TILE : 0;
    long end_tile = (c->start + last_token - c->base) / TILE + 1;
    for (; tile < end_tile; tile += KEYS / TILE) {
        long count = end_tile - tile < KEYS / TILE ? end_tile - tile : KEYS / TILE;
        for (long t = 0; t < count; t++)
            product(j, w->query, width, keys + (tile + t) * j->key_tile, j->dtype == FLOAT32 ? dim : width, rows, 1,
                    w->scores + t * TILE, KEYS);
        for (long r = 0; r < rows; r++) {
            long position = c->start + (block * QUERIES + r) / group;
            long first = j->window > 0 ? position - j->window + 1 : 0;
            weigh(w, r, c->base + tile * TILE, count * TILE, first, position, width, j->scale, j->dtype);
        }
        for (long pair = 0; pair < pairs; pair++)
            product(j, w->weights, KEYS, values + (pair * c->tiles + tile) * piece, count * TILE, rows, 0,
                    w->output + pair * 32, width);
    }
    for (long r = 0; r < rows; r++) {
        long token = (block * QUERIES + r) / group, g = (block * QUERIES + r) % group;
        long to = (c->first_token + token) * j->ld_out + (head * group + g) * dim;
        for (long d = 0; d < dim; d += 16) {
            __m512 v = _mm512_div_ps(_mm512_load_ps(w->output + r * width + d), _mm512_set1_ps(w->sum[r]));
            store16(j->out, to + d, j->dtype, v);
        }
    }
}

static void attend_blocks(const void *argument, long begin, long end) {
    const prefill_job *j = argument;
    workspace w __attribute__((aligned(64))); /* 130 KiB of stack */
    if (j->dtype == BFLOAT16) configure_tiles();
    long row = 0;
    for (long item = begin; item < end; item++) {
        while (j->chunks[row + 1].blocks <= item) row++;
        long inside = item - j->chunks[row].blocks;
        attend_block(j, row, inside % j->kv_heads, inside / j->kv_heads, &w);
    }
    if (j->dtype == BFLOAT16) _tile_release();
}

/* q: [tokens, kv_heads * group, dim], row r's chunk being tokens first_tokens[r] .. + lengths[r] at positions starts[r]
 * .., whose keys and values are in the pool; out: [tokens, kv_heads * group * dim]; window 0: none. dim: a multiple of
 * 16, at most MAX_DIM. Returns 0, or -1 without memory. */
int baton_prefill_attention(const void *q, long ld_q, const void *pool, const int32_t *tables, long table_width,
                            const int64_t *starts, const int64_t *lengths, const int64_t *first_tokens, long rows,
                            long kv_heads, long group, long dim, long block_size, long window, float scale, int dtype,
                            void *out, long ld_out) {
    static __thread scratch index, packed;
    chunk *chunks = scratch_of(&index, (rows + 1) * sizeof(chunk));
    if (chunks == NULL) return -1;
    chunk at = {0, 0, 0, 0, 0, 0, 0};
    for (long row = 0; row < rows; row++) {
        long first = window > 0 && starts[row] >= window ? starts[row] - window + 1 : 0;
        at.start = starts[row];
        at.length = lengths[row];
        at.first_token = first_tokens[row];
        at.base = first / TILE * TILE;
        at.tiles = rounded_up(at.start + at.length - at.base, TILE) / TILE;
        chunks[row] = at;
        at.packed += at.tiles;
        at.blocks += rounded_up(at.length * group, QUERIES) / QUERIES * kv_heads;
    }
    chunks[rows] = at;
    long size = dtype == FLOAT32 ? 4 : 2, width = rounded_up(dim, 32);
    long key_tile = TILE * (dtype == FLOAT32 ? dim : width) * size, value_tile = TILE * width * size;
    long tiles = at.packed * kv_heads;
    char *memory = scratch_of(&packed, (size_t)tiles * (key_tile + value_tile));
    if (memory == NULL) return -1;
    prefill_job job = {
        q, pool, ld_q, tables, table_width, rows, kv_heads, group, dim, block_size, window, scale, dtype, out, ld_out,
        chunks, memory, memory + tiles * key_tile, key_tile, value_tile,
    };
    do_parallel(pack_tiles, &job, tiles, even_share(tiles));
    do_parallel(attend_blocks, &job, at.blocks, 2);
    return 0;
}
