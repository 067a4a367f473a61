/* The parts of a step between its matrix products, for a CPU: each pass over memory that torch would make several of.
 *
 * `typed.h` is compiled once per dtype. Arithmetic is in float32 whatever the dtype, and what torch would round to the dtype in between
 * is rounded here too. Rows are contiguous unless a stride (in elements) says otherwise. NaN and infinities go through every function as
 * they do in torch: rows are checked for them before they are written to a file.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Raised whenever a signature or a meaning changes, so that an older library is never called. */
#define STRATA_KERNELS_VERSION 2

/* Below so many elements a second thread costs more than it saves. */
#define ELEMENTS_WORTH_A_THREAD 8192
/* Positions of one sequence that one thread attends to; longer ones are shared out and put together afterwards. */
#define POSITIONS_PER_PART 128
#define TILE 32
/* Query rows of one key head that go through keys and values together. */
#define QUERIES 4
_Static_assert(QUERIES == 4, "attend_part has a case for every smaller number of rows");
/* Positions by which keys are fetched before they are needed. */
#define AHEAD 24

int64_t strata_kernels_version(void) { return STRATA_KERNELS_VERSION; }

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bfloat16(uint16_t value) { return as_float((uint32_t)value << 16); }

/* To the nearest, ties to even; NaN stays NaN. */
static inline uint16_t to_bfloat16(float value) {
    uint32_t bits = as_bits(value);
    uint16_t rounded = (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? (uint16_t)0x7FC0u : rounded;
}

/* e^x to about one unit in the last place: 2^n times the Taylor polynomial of the rest, |rest| <= ln(2) / 2. Below -87 it is 0. */
static inline float exponential(float x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest integer */
    float bounded = x > 88.0f ? 88.0f : x;
    float shifted = bounded * 1.44269504f + magic;
    float n = shifted - magic;
    float rest = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * rest + 1.0f / 720.0f;
    p = p * rest + 1.0f / 120.0f;
    p = p * rest + 1.0f / 24.0f;
    p = p * rest + 1.0f / 6.0f;
    p = p * rest + 0.5f;
    p = p * rest + 1.0f;
    p = p * rest + 1.0f;
    /* n as an integer stands in the last bits of `shifted`; converting it would be undefined for NaN. */
    float power = as_float((as_bits(shifted) - as_bits(magic) + 127u) << 23);
    return x < -87.0f ? 0.0f : p * power;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* Exact to the last digits also near 0, where 1 - 2 / (e^2x + 1) would lose them: there the Padé approximant [7/6]. */
static inline float hyperbolic_tangent(float x) {
    float s = x * x;
    float near = x * (135135.0f + s * (17325.0f + s * (378.0f + s))) / (135135.0f + s * (62370.0f + s * (3150.0f + s * 28.0f)));
    float far = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
    return s < 1.0f ? near : far;
}

static inline float silu(float x) { return x * sigmoid(x); }

/* x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3), and (1 + tanh(u)) / 2 = sigmoid(2 u). */
static inline float gelu_tanh(float x) { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }

static inline int threads_for(int64_t elements, int threads) {
    int64_t useful = elements / ELEMENTS_WORTH_A_THREAD;
    return useful < 1 ? 1 : useful < threads ? (int)useful : threads;
}

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define MAX_HEAD_DIM 512
/* Vectors of a value that are summed at once: with QUERIES rows each, they fit in registers. */
#define VALUE_VECTORS (LANES == 16 ? 4 : 2)
typedef float vector __attribute__((vector_size(LANES * 4)));
typedef uint32_t bits_vector __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves_vector __attribute__((vector_size(LANES * 2)));

static inline int64_t vectors_of(int64_t dim) { return (dim + LANES - 1) / LANES; }

/* Floats that are kept of one query row: its largest score, the sum of its exponentials, its weighted values. */
static inline int64_t state_size(int64_t dim) { return 2 + vectors_of(dim) * LANES; }

static inline vector load_vector(const float *from) {
    vector loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

static inline vector load_bfloat16_vector(const uint16_t *from) {
    halves_vector halves;
    memcpy(&halves, from, sizeof halves);
    return (vector)(__builtin_convertvector(halves, bits_vector) << 16);
}

static inline void store_vector(float *to, vector value) { memcpy(to, &value, sizeof value); }

typedef int32_t index_vector __attribute__((vector_size(LANES * 4)));

/* Elements of two vectors, by their numbers (those of the second one begin with LANES). */
#if defined(__clang__)
#define PICK(first, second, ...) __builtin_shufflevector(first, second, __VA_ARGS__)
#else
#define PICK(first, second, ...) __builtin_shuffle(first, second, (index_vector){__VA_ARGS__})
#endif

/* Two vectors become one: neighbouring groups of `width` elements of each are added up, the first one's and the second one's in turn. */
#define FOLD(first, second, width) (PICK(first, second, LOWER_##width) + PICK(first, second, UPPER_##width))
#if LANES == 16
#define LOWER_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define UPPER_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOWER_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define UPPER_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOWER_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define UPPER_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOWER_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define UPPER_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#elif LANES == 8
#define LOWER_4 0, 1, 2, 3, 8, 9, 10, 11
#define UPPER_4 4, 5, 6, 7, 12, 13, 14, 15
#define LOWER_2 0, 1, 8, 9, 4, 5, 12, 13
#define UPPER_2 2, 3, 10, 11, 6, 7, 14, 15
#define LOWER_1 0, 8, 2, 10, 4, 12, 6, 14
#define UPPER_1 1, 9, 3, 11, 5, 13, 7, 15
#else
#define LOWER_2 0, 1, 4, 5
#define UPPER_2 2, 3, 6, 7
#define LOWER_1 0, 4, 2, 6
#define UPPER_1 1, 5, 3, 7
#endif

/* Element i of the result is the sum over terms[i], LANES of them. Overwrites `terms`. */
static inline vector sums_of(vector *terms) {
#if LANES >= 16
    for (int i = 0; i < 8; i++) terms[i] = FOLD(terms[i], terms[i + 8], 8);
#endif
#if LANES >= 8
    for (int i = 0; i < 4; i++) terms[i] = FOLD(terms[i], terms[i + 4], 4);
#endif
    for (int i = 0; i < 2; i++) terms[i] = FOLD(terms[i], terms[i + 2], 2);
    return FOLD(terms[0], terms[1], 1);
}

static inline int64_t parts_of(int64_t positions) { return (positions + POSITIONS_PER_PART - 1) / POSITIONS_PER_PART; }

/* The work of one thread: some positions of one sequence. */
struct part {
    const float *queries; /* [kv_heads * group, dim], scaled, rows padded to whole vectors */
    int64_t group, kv_heads;
    const int64_t *table;
    int64_t block_size, begin, end; /* at most POSITIONS_PER_PART positions */
    float soft_cap;
    /* Per key head, head_stride apart, `group` times state_size floats: the largest score, the sum of the exponentials relative to it, and
     * the weighted values, not yet divided by that sum. */
    float *states;
    int64_t head_stride;
};

#define STATE float
#define NAME(function) function##_float32
#define LOAD(value) (value)
#define LOAD_VECTOR(from) load_vector(from)
#define STORE(value) (value)
#include "typed.h"
#undef STATE
#undef NAME
#undef LOAD
#undef LOAD_VECTOR
#undef STORE

#define STATE uint16_t
#define NAME(function) function##_bfloat16
#define LOAD(value) from_bfloat16(value)
#define LOAD_VECTOR(from) load_bfloat16_vector(from)
#define STORE(value) to_bfloat16(value)
#include "typed.h"

#include "prompts.h"
