/* Included by kernels.c. */

/* Attention of several new positions per sequence, in float32: in bfloat16 torch has processors' matrix units to itself.
 *
 * A tile of query rows stands across QUERY_VECTORS vectors, so that scores, their exponentials and the weighted values of all of
 * them are computed side by side; keys and values are read where they lie, element by element. STEP x QUERY_VECTORS sums fit in registers. */
#define QUERY_VECTORS 3
#define QUERY_ROWS (QUERY_VECTORS * LANES)
#if LANES == 16
#define STEP 8
#else
#define STEP 4
#endif
#define KEY_TILE 64
#define PIECE 64
/* Where no key has been seen yet: finite, so that no infinity is subtracted from another. */
#define NOTHING_SEEN -1e30f

/* scores[k][q] = sum over i of keys[k][i] * queries[i][q], for STEP keys: in pieces of PIECE, so that wide heads don't lose digits. */
static inline void score_keys(const float *const *keys, const float *queries, int64_t dim, float *scores) {
    for (int64_t first = 0; first < dim; first += PIECE) {
        int64_t end = dim - first < PIECE ? dim : first + PIECE;
        vector sums[STEP][QUERY_VECTORS] = {0};
        for (int64_t i = first; i < end; i++) {
            vector row[QUERY_VECTORS];
            for (int v = 0; v < QUERY_VECTORS; v++) row[v] = load_vector(queries + i * QUERY_ROWS + v * LANES);
            for (int k = 0; k < STEP; k++)
                for (int v = 0; v < QUERY_VECTORS; v++) sums[k][v] += keys[k][i] * row[v];
        }
        for (int k = 0; k < STEP; k++) {
            for (int v = 0; v < QUERY_VECTORS; v++) {
                float *to = scores + k * QUERY_ROWS + v * LANES;
                store_vector(to, first ? load_vector(to) + sums[k][v] : sums[k][v]);
            }
        }
    }
}

/* mixed[i][q] = mixed[i][q] * shrink[q] + sum over k of values[k][i] * weights[k][q], for `rows` elements i from `first` on. */
static inline __attribute__((always_inline)) void mix_values(const float *const *values, int64_t count, const float *weights,
                                                             const float *shrink, int64_t first, const int rows, float *mixed) {
    vector sums[STEP][QUERY_VECTORS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < QUERY_VECTORS; v++)
            sums[i][v] = load_vector(mixed + (first + i) * QUERY_ROWS + v * LANES) * load_vector(shrink + v * LANES);
    for (int64_t k = 0; k < count; k++) {
        const float *value = values[k] + first;
        vector row[QUERY_VECTORS];
        for (int v = 0; v < QUERY_VECTORS; v++) row[v] = load_vector(weights + k * QUERY_ROWS + v * LANES);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < QUERY_VECTORS; v++) sums[i][v] += value[i] * row[v];
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < QUERY_VECTORS; v++) store_vector(mixed + (first + i) * QUERY_ROWS + v * LANES, sums[i][v]);
}

/* Turns the scores of `count` keys into weights and updates largest score and sum per query row; shrink: what the earlier sums are worth. */
static inline void weigh(float *scores, int64_t count, float *largest, float *sum, float *shrink) {
    for (int64_t q = 0; q < QUERY_ROWS; q += LANES) {
        float most[LANES], total[LANES] = {0};
#pragma omp simd
        for (int i = 0; i < LANES; i++) most[i] = largest[q + i];
        for (int64_t k = 0; k < count; k++) {
#pragma omp simd
            for (int i = 0; i < LANES; i++) {
                float score = scores[k * QUERY_ROWS + q + i];
                most[i] = score <= most[i] ? most[i] : score; /* NaN wins */
            }
        }
        for (int64_t k = 0; k < count; k++) {
#pragma omp simd
            for (int i = 0; i < LANES; i++) {
                float weight = exponential(scores[k * QUERY_ROWS + q + i] - most[i]);
                scores[k * QUERY_ROWS + q + i] = weight;
                total[i] += weight;
            }
        }
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            shrink[q + i] = exponential(largest[q + i] - most[i]);
            sum[q + i] = sum[q + i] * shrink[q + i] + total[i];
            largest[q + i] = most[i];
        }
    }
}

/* Hides keys from the query rows that mustn't see them: those behind a row's own position, and those that have left its window (0: none). */
static inline void hide(float *scores, int64_t first_key, int64_t count, const int64_t *positions, int64_t window) {
    for (int64_t k = 0; k < count; k++) {
        int64_t key = first_key + k;
        for (int64_t q = 0; q < QUERY_ROWS; q++)
            if (key > positions[q] || (window && key <= positions[q] - window)) scores[k * QUERY_ROWS + q] = -INFINITY;
    }
}

/* A tile of query rows: `positions` positions of a chunk from batch row `row` and position `start` on, for one key head. */
static void attend_tile(const float *query, int64_t query_stride, const float *keys, const float *values, int64_t slot_stride,
                              const int64_t *table, int64_t block_size, int64_t row, int64_t start, int64_t positions, int64_t group,
                              int64_t dim, float scale, float soft_cap, const float *sinks, int64_t window, float *out,
                              int64_t out_stride) {
    float queries[MAX_HEAD_DIM * QUERY_ROWS], mixed[MAX_HEAD_DIM * QUERY_ROWS], scores[KEY_TILE * QUERY_ROWS];
    float largest[QUERY_ROWS], sum[QUERY_ROWS], shrink[QUERY_ROWS];
    int64_t position_of[QUERY_ROWS], end = start + positions, first = window && start + 1 > window ? start + 1 - window : 0;
    memset(mixed, 0, (size_t)(dim * QUERY_ROWS) * sizeof *mixed);
    for (int64_t q = 0; q < QUERY_ROWS; q++) {
        int64_t used = q < positions * group ? q : 0; /* rows to spare repeat the first one */
        const float *from = query + (row + used / group) * query_stride + used % group * dim;
        for (int64_t i = 0; i < dim; i++) queries[i * QUERY_ROWS + q] = from[i] * scale;
        position_of[q] = start + used / group;
        largest[q] = sinks ? sinks[used % group] : NOTHING_SEEN;
        sum[q] = sinks ? 1.0f : 0.0f;
    }
    for (int64_t low = first; low < end; low += KEY_TILE) {
        int64_t count = end - low < KEY_TILE ? end - low : KEY_TILE, padded = (count + STEP - 1) / STEP * STEP;
        const float *key_rows[KEY_TILE], *value_rows[KEY_TILE];
        for (int64_t k = 0; k < count; k++) {
            int64_t slot = table[(low + k) / block_size] * block_size + (low + k) % block_size;
            key_rows[k] = keys + slot * slot_stride;
            value_rows[k] = values + slot * slot_stride;
        }
        for (int64_t k = count; k < padded; k++) key_rows[k] = key_rows[count - 1];
        for (int64_t k = 0; k < padded; k += STEP) score_keys(key_rows + k, queries, dim, scores + k * QUERY_ROWS);
        if (soft_cap > 0.0f) {
            for (int64_t j = 0; j < count * QUERY_ROWS; j++) scores[j] = soft_cap * hyperbolic_tangent(scores[j] / soft_cap);
        }
        if (low + count > start || (window && low <= end - 1 - window)) hide(scores, low, count, position_of, window);
        weigh(scores, count, largest, sum, shrink);
        int64_t i = 0;
        for (; i + STEP <= dim; i += STEP) mix_values(value_rows, count, scores, shrink, i, STEP, mixed);
        if (i < dim) mix_values(value_rows, count, scores, shrink, i, (int)(dim - i), mixed);
    }
    for (int64_t q = 0; q < positions * group; q++) {
        float *to = out + (row + q / group) * out_stride + q % group * dim;
        float over = 1.0f / sum[q];
        for (int64_t i = 0; i < dim; i++) to[i] = mixed[i * QUERY_ROWS + q] * over;
    }
}

/* Causal attention of several new positions per sequence over its pages, their own included.
 * query, out: [batch rows, heads, dim], query rows query_stride apart; keys, values: [slots, kv_heads, dim];
 * tables: [n, table_width] block numbers by position / block_size; rows, starts, counts: [n], a chunk's first batch row, its first position
 * and its positions. window 0: none; soft_cap 0: none; sinks: [heads], a score per head that
 * takes its share of the weights and has no value, or null. dim is at most 512, heads / kv_heads at most QUERY_ROWS. */
int attend_chunks_float32(const float *query, int64_t query_stride, const float *keys, const float *values, const int64_t *tables,
                        int64_t table_width, const int64_t *rows, const int64_t *starts, const int64_t *counts, int64_t n, int64_t block_size,
                        int64_t heads, int64_t kv_heads, int64_t dim, float scale, float soft_cap, const float *sinks, int64_t window, float *out,
                        int threads) {
    int64_t group = heads / kv_heads, at_once = QUERY_ROWS / group, tiles = 0;
    if (at_once < 1 || dim > MAX_HEAD_DIM) return 1;
    for (int64_t i = 0; i < n; i++) tiles += (counts[i] + at_once - 1) / at_once;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t item = tiles * kv_heads - 1; item >= 0; item--) { /* a chunk's last tiles have most to do: first */
        int64_t head = item % kv_heads, tile = item / kv_heads, i = 0;
        for (int64_t of_chunk; tile >= (of_chunk = (counts[i] + at_once - 1) / at_once); i++) tile -= of_chunk;
        int64_t low = tile * at_once, positions = counts[i] - low < at_once ? counts[i] - low : at_once;
        attend_tile(query + head * group * dim, query_stride, keys + head * dim, values + head * dim, kv_heads * dim,
                          tables + i * table_width, block_size, rows[i] + low, starts[i] + low, positions, group, dim, scale, soft_cap,
                          sinks ? sinks + head * group : NULL, window, out + head * group * dim, heads * dim);
    }
    return 0;
}
