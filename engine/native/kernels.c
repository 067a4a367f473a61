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
#define STRATA_KERNELS_VERSION 1

/* Below so many elements a second thread costs more than it saves. */
#define ELEMENTS_WORTH_A_THREAD 8192
/* Positions of one sequence that one thread attends to; longer ones are shared out and put together afterwards. */
#define POSITIONS_PER_PART 512
#define TILE 32
/* Positions by which keys are fetched before they are needed. */
#define AHEAD 6

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
#define MAX_VECTORS (MAX_HEAD_DIM / LANES)
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

static inline float sum_of(vector value) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < LANES; i++) sum += value[i];
    return sum;
}

/* The work of one thread: some positions of one sequence, for the query rows of one key head. */
struct part {
    const float *query; /* [group, dim], scaled, rows padded to whole vectors */
    int64_t group, slot_stride;
    const int64_t *table;
    int64_t block_size, begin, end;
    float soft_cap;
    float *state; /* [group, state_size] */
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
