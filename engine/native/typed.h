/* Included by kernels.c once per dtype. */

#define ROUND(value) LOAD(STORE(value))

static inline float NAME(inverse_rms)(const STATE *row, int64_t width, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) {
        float value = LOAD(row[i]);
        sum += value * value;
    }
    return 1.0f / sqrtf(sum / (float)width + eps);
}

static inline void NAME(scale_row)(const STATE *row, float scale, const STATE *weight, const float *wide_weight, int64_t width, STATE *out) {
    if (wide_weight) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = STORE(LOAD(row[i]) * scale * wide_weight[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = STORE(ROUND(LOAD(row[i]) * scale) * LOAD(weight[i]));
    }
}

/* out[r] = x / rms(x) * weight for x = hidden[r], or hidden[r] + delta[r], which is then kept in sum[r].
 * hidden, delta, sum, out: [rows, width]; delta and sum may be null together. Exactly one of the weights, [width], is given: wide_weight is
 * applied before the result is rounded, weight after it. */
void NAME(rms_norm)(const STATE *hidden, const STATE *delta, STATE *sum, const STATE *weight, const float *wide_weight, float eps, int64_t rows,
                    int64_t width, STATE *out, int threads) {
#pragma omp parallel for num_threads(threads_for(rows *width, threads)) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const STATE *row = hidden + r * width;
        if (delta) {
            const STATE *added = delta + r * width;
            STATE *total = sum + r * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) total[i] = STORE(LOAD(row[i]) + LOAD(added[i]));
            row = total;
        }
        NAME(scale_row)(row, NAME(inverse_rms)(row, width, eps), weight, wide_weight, width, out + r * width);
    }
}

/* out[r, i] = activation(gate_up[r, i]) * gate_up[r, inner + i]; gate_up: [rows, 2 * inner], out: [rows, inner].
 * A macro, since a function handed to a parallel region would not be inlined. */
#define GATE(name, activation)                                                                                        \
    void NAME(name)(const STATE *gate_up, int64_t rows, int64_t inner, STATE *out, int threads) {                     \
        _Pragma("omp parallel for num_threads(threads_for(rows * inner, threads)) schedule(static)")                  \
        for (int64_t r = 0; r < rows; r++) {                                                                          \
            const STATE *gate = gate_up + 2 * r * inner, *up = gate + inner;                                          \
            STATE *to = out + r * inner;                                                                              \
            _Pragma("omp simd")                                                                                       \
            for (int64_t i = 0; i < inner; i++) to[i] = STORE(ROUND(activation(LOAD(gate[i]))) * LOAD(up[i]));        \
        }                                                                                                             \
    }

GATE(silu_gate, silu)
GATE(gelu_tanh_gate, gelu_tanh)

/* Rotates each pair (i, i + dim / 2) of every head by its row's angle, after a norm per head where one is given.
 * in: [rows, heads, dim], rows in_stride apart; cosine, signed_sine: [rows, dim], the sine's first half negated;
 * weight, wide_weight: [heads, dim], at most one of them given; out: [rows, heads, dim]. dim is at most 512. */
void NAME(rotate)(const STATE *in, int64_t in_stride, const STATE *cosine, const STATE *signed_sine, const STATE *weight,
                  const float *wide_weight, float eps, int64_t rows, int64_t heads, int64_t dim, STATE *out, int threads) {
    int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads_for(rows *heads *dim, threads)) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const STATE *cos_row = cosine + r * dim, *sin_row = signed_sine + r * dim;
        STATE normed[MAX_HEAD_DIM];
        for (int64_t h = 0; h < heads; h++) {
            const STATE *head = in + r * in_stride + h * dim;
            STATE *to = out + (r * heads + h) * dim;
            if (weight || wide_weight) {
                NAME(scale_row)(head, NAME(inverse_rms)(head, dim, eps), weight ? weight + h * dim : NULL,
                                wide_weight ? wide_weight + h * dim : NULL, dim, normed);
                head = normed;
            }
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float first = LOAD(head[i]), second = LOAD(head[i + half]);
                to[i] = STORE(first * LOAD(cos_row[i]) + second * LOAD(sin_row[i]));
                to[i + half] = STORE(second * LOAD(cos_row[i + half]) + first * LOAD(sin_row[i + half]));
            }
        }
    }
}

/* Elements at … at + LANES - 1 of a row of `dim`; what lies beyond it is 0. */
static inline vector NAME(load)(const STATE *from, int64_t at, int64_t dim) {
    if (at + LANES <= dim) return LOAD_VECTOR(from + at);
    STATE rest[LANES] = {0};
    for (int64_t i = at; i < dim; i++) rest[i - at] = from[i];
    return LOAD_VECTOR(rest);
}

/* Has a row brought into the processor's cache: pages lie apart, which its own guesses don't foresee. */
static inline void NAME(fetch)(const STATE *row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 64 / (int64_t)sizeof(STATE)) __builtin_prefetch(row + i);
}

/* One part of one key head: `group` query rows over positions begin … end - 1 of one sequence. Query rows and `state` are padded to whole
 * vectors. Leaves per query row the largest score, the sum of the exponentials relative to it, and the weighted values, not yet divided by
 * that sum. Inlined for every head_dim that is known beforehand, so that all of a row stays in registers. */
static inline __attribute__((always_inline)) void NAME(attend_part)(const struct part *part, const STATE *keys, const STATE *values,
                                                                    const int64_t dim) {
    const int64_t vectors = vectors_of(dim);
    float scores[TILE];
    vector mixed[MAX_VECTORS], query[MAX_VECTORS];
    for (int64_t low = part->begin; low < part->end; low += TILE) {
        int64_t count = part->end - low < TILE ? part->end - low : TILE, offsets[TILE];
        for (int64_t p = 0; p < count; p++) {
            int64_t block = part->table[(low + p) / part->block_size];
            offsets[p] = (block * part->block_size + (low + p) % part->block_size) * part->slot_stride;
        }
        for (int64_t g = 0; g < part->group; g++) {
            float *head = part->state + g * state_size(dim), largest = head[0], sum = 0.0f;
            for (int64_t v = 0; v < vectors; v++) query[v] = load_vector(part->query + (g * vectors + v) * LANES);
            for (int64_t p = 0; p < count; p++) {
                if (g == 0 && p + AHEAD < count) NAME(fetch)(keys + offsets[p + AHEAD], dim);
                if (g == 0) NAME(fetch)(values + offsets[p], dim);
                vector products = query[0] * NAME(load)(keys + offsets[p], 0, dim);
                for (int64_t v = 1; v < vectors; v++) products += query[v] * NAME(load)(keys + offsets[p], v * LANES, dim);
                scores[p] = sum_of(products);
            }
            if (part->soft_cap > 0.0f) {
                for (int64_t p = 0; p < count; p++) scores[p] = part->soft_cap * hyperbolic_tangent(scores[p] / part->soft_cap);
            }
            for (int64_t p = 0; p < count; p++) largest = scores[p] > largest || isnan(scores[p]) ? scores[p] : largest;
            float shrink = exponential(head[0] - largest);
#pragma omp simd reduction(+ : sum)
            for (int64_t p = 0; p < count; p++) {
                scores[p] = exponential(scores[p] - largest);
                sum += scores[p];
            }
            head[0] = largest;
            head[1] = head[1] * shrink + sum;
            for (int64_t v = 0; v < vectors; v++) mixed[v] = shrink * load_vector(head + 2 + v * LANES);
            for (int64_t p = 0; p < count; p++)
                for (int64_t v = 0; v < vectors; v++) mixed[v] += scores[p] * NAME(load)(values + offsets[p], v * LANES, dim);
            for (int64_t v = 0; v < vectors; v++) store_vector(head + 2 + v * LANES, mixed[v]);
        }
    }
}

static void NAME(attend_any_part)(const struct part *part, const STATE *keys, const STATE *values, int64_t dim) {
    for (int64_t g = 0; g < part->group; g++) {
        float *head = part->state + g * state_size(dim);
        memset(head, 0, (size_t)state_size(dim) * sizeof *head);
        head[0] = -INFINITY;
    }
    switch (dim) {
        case 64: NAME(attend_part)(part, keys, values, 64); break;
        case 128: NAME(attend_part)(part, keys, values, 128); break;
        case 256: NAME(attend_part)(part, keys, values, 256); break;
        default: NAME(attend_part)(part, keys, values, dim);
    }
}

/* Puts the parts of one key head of one sequence together (each relative to its own largest score) and writes `group` rows of `out`. */
static void NAME(join_parts)(const float *states, int64_t parts, int64_t part_stride, int64_t group, int64_t dim, STATE *out) {
    for (int64_t g = 0; g < group; g++) {
        const float *first = states + g * state_size(dim);
        float largest = first[0], sum = 0.0f;
        for (int64_t p = 1; p < parts; p++) {
            float other = first[p * part_stride];
            largest = other > largest || isnan(other) ? other : largest;
        }
        for (int64_t p = 0; p < parts; p++) sum += first[p * part_stride + 1] * exponential(first[p * part_stride] - largest);
        for (int64_t i = 0; i < dim; i++) {
            float mixed = 0.0f;
            for (int64_t p = 0; p < parts; p++) mixed += first[p * part_stride + 2 + i] * exponential(first[p * part_stride] - largest);
            out[g * dim + i] = STORE(mixed / sum);
        }
    }
}

/* Attention of one new position per sequence over its pages.
 * query, out: [batch rows, heads, dim], query rows query_stride apart; rows: [n], the batch row of each sequence;
 * keys, values: [slots, kv_heads, dim]; tables: [n, table_width] block numbers by position / block_size;
 * begins, ends: [n], the positions seen are begin … end - 1, at least one. soft_cap 0: none. dim is at most MAX_HEAD_DIM.
 * Returns 0, or 1 when memory has run out. */
int NAME(attend_decodes)(const STATE *query, int64_t query_stride, const int64_t *rows, const STATE *keys, const STATE *values,
                         const int64_t *tables, int64_t table_width, const int64_t *begins, const int64_t *ends, int64_t n,
                         int64_t block_size, int64_t heads, int64_t kv_heads, int64_t dim, float scale, float soft_cap, STATE *out,
                         int threads) {
    int64_t group = heads / kv_heads, padded = vectors_of(dim) * LANES, part_stride = group * state_size(dim), longest = 0;
    for (int64_t i = 0; i < n; i++) longest = ends[i] - begins[i] > longest ? ends[i] - begins[i] : longest;
    int64_t parts = (longest + POSITIONS_PER_PART - 1) / POSITIONS_PER_PART;
    float *states = malloc((size_t)(n * kv_heads * parts * part_stride) * sizeof *states);
    float *queries = calloc((size_t)(n * heads * padded), sizeof *queries);
    if (!states || !queries) {
        free(states);
        free(queries);
        return 1;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t j = 0; j < dim; j++)
                queries[(i * heads + h) * padded + j] = LOAD(query[rows[i] * query_stride + h * dim + j]) * scale;
#pragma omp parallel num_threads(threads_for(n *heads *longest *dim / 8, threads))
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < n * parts * kv_heads; item++) {
            int64_t head = item % kv_heads, i = item / kv_heads % n, begin = begins[i] + item / kv_heads / n * POSITIONS_PER_PART;
            struct part part = {
                .query = queries + (i * heads + head * group) * padded,
                .group = group,
                .slot_stride = kv_heads * dim,
                .table = tables + i * table_width,
                .block_size = block_size,
                .begin = begin,
                .end = begin + POSITIONS_PER_PART < ends[i] ? begin + POSITIONS_PER_PART : ends[i],
                .soft_cap = soft_cap,
                .state = states + ((i * kv_heads + head) * parts + item / kv_heads / n) * part_stride,
            };
            if (part.begin < part.end) NAME(attend_any_part)(&part, keys + head * dim, values + head * dim, dim);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < n * kv_heads; item++) {
            int64_t head = item % kv_heads, i = item / kv_heads;
            int64_t used = (ends[i] - begins[i] + POSITIONS_PER_PART - 1) / POSITIONS_PER_PART;
            NAME(join_parts)(states + item * parts * part_stride, used, part_stride, group, dim, out + (rows[i] * heads + head * group) * dim);
        }
    }
    free(states);
    free(queries);
    return 0;
}

#undef GATE
#undef ROUND
