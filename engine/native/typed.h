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

/* `rows` query rows of one key head over `count` positions at `offsets` (padded to whole vectors with repetitions), all rows in one pass
 * over keys and values. Query rows are padded to whole vectors. `states`: per row as in `struct part`. Inlined for every number of rows, and
 * for every head_dim that is known beforehand, so that sums stay in registers. `fetch`: whether rows are asked for ahead of time; of
 * `ahead` positions the offsets are known. */
static inline __attribute__((always_inline)) void NAME(attend_rows)(const float *queries, const STATE *keys, const STATE *values,
                                                                    const int64_t *offsets, int64_t count, int64_t ahead, float soft_cap,
                                                                    float *states, const int64_t dim, const int rows, const int fetch) {
    const int64_t vectors = vectors_of(dim), size = state_size(dim);
    float scores[QUERIES][TILE], shrink[QUERIES];
    for (int64_t p = 0; p < count; p += LANES) {
        vector products[QUERIES][LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            const STATE *key = keys + offsets[p + lane];
            if (fetch) {
                NAME(fetch)(values + offsets[p + lane], dim);
                if (p + lane + AHEAD < ahead) NAME(fetch)(keys + offsets[p + lane + AHEAD], dim);
            }
            vector sums[QUERIES] = {0};
            for (int64_t v = 0; v < vectors; v++) {
                vector part_of_key = NAME(load)(key, v * LANES, dim);
                for (int r = 0; r < rows; r++) sums[r] += load_vector(queries + (r * vectors + v) * LANES) * part_of_key;
            }
            for (int r = 0; r < rows; r++) products[r][lane] = sums[r];
        }
        for (int r = 0; r < rows; r++) store_vector(scores[r] + p, sums_of(products[r]));
    }
    for (int r = 0; r < rows; r++) {
        float *score = scores[r], *state = states + r * size, largest = state[0], sum = 0.0f;
        if (soft_cap > 0.0f) {
            for (int64_t p = 0; p < count; p++) score[p] = soft_cap * hyperbolic_tangent(score[p] / soft_cap);
        }
        for (int64_t p = 0; p < count; p++) largest = score[p] > largest || isnan(score[p]) ? score[p] : largest;
        shrink[r] = exponential(state[0] - largest);
#pragma omp simd reduction(+ : sum)
        for (int64_t p = 0; p < count; p++) {
            score[p] = exponential(score[p] - largest);
            sum += score[p];
        }
        state[0] = largest;
        state[1] = state[1] * shrink[r] + sum;
    }
    for (int64_t first = 0; first < vectors; first += VALUE_VECTORS) {
        const int64_t width = vectors - first < VALUE_VECTORS ? vectors - first : VALUE_VECTORS;
        vector mixed[QUERIES][VALUE_VECTORS];
        for (int r = 0; r < rows; r++)
            for (int64_t v = 0; v < width; v++) mixed[r][v] = shrink[r] * load_vector(states + r * size + 2 + (first + v) * LANES);
        for (int64_t p = 0; p < count; p++) {
            for (int64_t v = 0; v < width; v++) {
                vector value = NAME(load)(values + offsets[p], (first + v) * LANES, dim);
                for (int r = 0; r < rows; r++) mixed[r][v] += scores[r][p] * value;
            }
        }
        for (int r = 0; r < rows; r++)
            for (int64_t v = 0; v < width; v++) store_vector(states + r * size + 2 + (first + v) * LANES, mixed[r][v]);
    }
}

static inline __attribute__((always_inline)) void NAME(attend_part)(const struct part *part, const STATE *keys, const STATE *values,
                                                                    const int64_t dim) {
    const int64_t padded = vectors_of(dim) * LANES, size = state_size(dim), total = part->end - part->begin;
    int64_t offsets[POSITIONS_PER_PART];
    for (int64_t p = 0; p < total; p++) {
        int64_t position = part->begin + p, block = part->table[position / part->block_size];
        offsets[p] = (block * part->block_size + position % part->block_size) * part->kv_heads * dim;
    }
    for (int64_t p = total; p % LANES; p++) offsets[p] = offsets[total - 1];
    for (int64_t low = 0; low < total; low += TILE) {
        int64_t count = total - low < TILE ? total - low : TILE;
        for (int64_t head = 0; head < part->kv_heads; head++) {
            const STATE *k = keys + head * dim, *v = values + head * dim;
            const float *queries = part->queries + head * part->group * padded;
            float *states = part->states + head * part->head_stride;
            int64_t g = 0;
#define ATTEND(rows) \
    NAME(attend_rows)(queries + g * padded, k, v, offsets + low, count, total - low, part->soft_cap, states + g * size, dim, rows, g == 0)
            for (; g + QUERIES <= part->group; g += QUERIES) ATTEND(QUERIES);
            switch (part->group - g) {
                case 3: ATTEND(3); break;
                case 2: ATTEND(2); break;
                case 1: ATTEND(1); break;
            }
#undef ATTEND
        }
    }
}

static void NAME(attend_any_part)(const struct part *part, const STATE *keys, const STATE *values, int64_t dim) {
    for (int64_t head = 0; head < part->kv_heads; head++) {
        float *states = part->states + head * part->head_stride;
        memset(states, 0, (size_t)(part->group * state_size(dim)) * sizeof *states);
        for (int64_t g = 0; g < part->group; g++) states[g * state_size(dim)] = -INFINITY;
    }
    switch (dim) {
        case 64: NAME(attend_part)(part, keys, values, 64); break;
        case 128: NAME(attend_part)(part, keys, values, 128); break;
        case 256: NAME(attend_part)(part, keys, values, 256); break;
        default: NAME(attend_part)(part, keys, values, dim);
    }
}

/* Puts the parts of one key head of one sequence together (each relative to its own largest score) and writes `group` rows of `out`. */
static void NAME(join_parts)(const float *states, int64_t parts, int64_t part_stride, int64_t group, int64_t dim,
                             const float *sinks, STATE *out) {
    for (int64_t g = 0; g < group; g++) {
        const float *first = states + g * state_size(dim);
        float largest = first[0], mixed[MAX_HEAD_DIM] = {0};
        for (int64_t p = 1; p < parts; p++) {
            float other = first[p * part_stride];
            largest = other > largest || isnan(other) ? other : largest;
        }
        if (sinks) largest = sinks[g] > largest ? sinks[g] : largest;
        float sum = sinks ? exponential(sinks[g] - largest) : 0.0f;
        for (int64_t p = 0; p < parts; p++) {
            const float *part = first + p * part_stride;
            float share = exponential(part[0] - largest);
            sum += part[1] * share;
#pragma omp simd
            for (int64_t i = 0; i < dim; i++) mixed[i] += part[2 + i] * share;
        }
        for (int64_t i = 0; i < dim; i++) out[g * dim + i] = STORE(mixed[i] / sum);
    }
}

/* Attention of one new position per sequence over its pages.
 * query, out: [batch rows, heads, dim], query rows query_stride apart; rows: [n], the batch row of each sequence;
 * keys, values: [slots, kv_heads, dim]; tables: [n, table_width] block numbers by position / block_size;
 * begins, ends: [n], the positions seen are begin … end - 1, at least one. soft_cap 0: none; sinks: as in attend_chunks. dim is at most MAX_HEAD_DIM.
 * Returns 0, or 1 when memory has run out. */
int NAME(attend_decodes)(const STATE *query, int64_t query_stride, const int64_t *rows, const STATE *keys, const STATE *values,
                         const int64_t *tables, int64_t table_width, const int64_t *begins, const int64_t *ends, int64_t n,
                         int64_t block_size, int64_t heads, int64_t kv_heads, int64_t dim, float scale, float soft_cap,
                         const float *sinks, STATE *out, int threads) {
    int64_t group = heads / kv_heads, padded = vectors_of(dim) * LANES, part_stride = group * state_size(dim), parts = 0, positions = 0;
    for (int64_t i = 0; i < n; i++) {
        parts += parts_of(ends[i] - begins[i]);
        positions += ends[i] - begins[i];
    }
    float *states = malloc((size_t)(parts * kv_heads * part_stride) * sizeof *states);
    float *queries = calloc((size_t)(n * heads * padded), sizeof *queries);
    int64_t *owners = malloc((size_t)parts * sizeof *owners), *firsts = malloc((size_t)n * sizeof *firsts);
    if (!states || !queries || !owners || !firsts) {
        free(states);
        free(queries);
        free(owners);
        free(firsts);
        return 1;
    }
    for (int64_t i = 0, item = 0; i < n; i++) {
        firsts[i] = item;
        for (int64_t left = parts_of(ends[i] - begins[i]); left > 0; left--) owners[item++] = i;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t j = 0; j < dim; j++)
                queries[(i * heads + h) * padded + j] = LOAD(query[rows[i] * query_stride + h * dim + j]) * scale;
#pragma omp parallel num_threads(threads_for(positions *heads *dim / 8, threads))
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < parts; item++) {
            int64_t i = owners[item], number = item - firsts[i], begin = begins[i] + number * POSITIONS_PER_PART;
            struct part part = {
                .queries = queries + i * heads * padded,
                .group = group,
                .kv_heads = kv_heads,
                .table = tables + i * table_width,
                .block_size = block_size,
                .begin = begin,
                .end = begin + POSITIONS_PER_PART < ends[i] ? begin + POSITIONS_PER_PART : ends[i],
                .soft_cap = soft_cap,
                .states = states + (firsts[i] * kv_heads + number) * part_stride,
                .head_stride = parts_of(ends[i] - begins[i]) * part_stride,
            };
            NAME(attend_any_part)(&part, keys, values, dim);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < n * kv_heads; item++) {
            int64_t head = item % kv_heads, i = item / kv_heads, used = parts_of(ends[i] - begins[i]);
            const float *of_head = states + (firsts[i] * kv_heads + head * used) * part_stride;
            NAME(join_parts)(of_head, used, part_stride, group, dim, sinks ? sinks + head * group : NULL,
                              out + (rows[i] * heads + head * group) * dim);
        }
    }
    free(states);
    free(queries);
    free(owners);
    free(firsts);
    return 0;
}

#undef GATE
#undef ROUND
