/* The hot loops of the CPU backend (cpu.py compiles this file and calls gemm, combine and quantize).

   Layout. A weight row is K codes (e2m1, two to a byte, low nibble = even k) and K/16 block scales
   (e4m3 bytes). Its codes come out of the decoder as a vector of even and a vector of odd elements,
   so the token side x is stored that way too, once per stage: in steps of STEP elements, first the
   even, then the odd ones, zeros up to a whole step. Nothing is interleaved inside the loops.

   Loops. out[row, n] = sum_k code[n, k] * sf[n, k/16] * x[row, k] in fp32 lanes along K; lanes are
   added at the end. The work items of a stage are (expert, tile of weight rows): threads share them
   by a counter, none ever splits K, so the result does not depend on the number of threads.
   - few tokens for an expert: dot_codes decodes in registers, NR weight rows by up to NT tokens. The
     sum over a block is multiplied by the block's scale, so weights cost 4.5 bits of memory each;
   - many tokens: the tile is dequantized once (code * sf is exact) into a buffer that stays in the
     L2 cache, and dot_tile runs over all tokens of the expert.

   Paths. The second half of this file is compiled once for each instruction set, with the macros
   defined at the end of the first half: portable (vector extensions of the compiler), avx2, avx512
   and avx512bf16. In the last one x and the dequantized weights are bf16, exactly: it takes rows
   that are bf16 or NVFP4 (code * sf has 6 significant bits) and leaves the others to avx512.  */

#ifndef PATH

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define MIN(a, b) ((a) < (b) ? (a) : (b))

enum { FP32, BF16, FP16, NVFP4 };          /* element types, as cpu.py numbers them */
enum { RAW, RELU2, SILU, GELU_TANH };      /* gate kinds */
enum { MAX_TILE = 32, MAX_THREADS = 256, K_BLOCK = 4096 }; /* weight rows of a tile; threads; bytes */

/* ---- numbers ---- */

INLINE uint32_t bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE float number(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

INLINE float from_f16(uint16_t h) {
    uint32_t u = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t normal = u + (u >= 31u << 23 ? 224u << 23 : 112u << 23);
    return number(sign | (u < 1u << 23 ? bits((float)(int32_t)(u >> 13) * 0x1p-24f) : normal));
}

INLINE uint16_t to_f16(float f) { /* ties to even */
    uint32_t u = bits(f) & 0x7fffffff, sign = bits(f) >> 16 & 0x8000;
    uint32_t small = bits(number(u) + 0.5f) - bits(0.5f); /* a subnormal is a multiple of 2^-24 */
    uint32_t normal = (u + 0xfff + (u >> 13 & 1) - (112u << 23)) >> 13;
    uint32_t big = u > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (u < 113u << 23 ? small : u >= 143u << 23 ? big : normal));
}

INLINE uint16_t to_bf16(float f) {
    uint32_t u = bits(f);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

INLINE float from_e4m3(uint8_t b) { /* not negative */
    return b >= 0x7f ? number(0x7fc00000) : b < 8 ? (float)b * 0x1p-9f : number(((uint32_t)b << 20) + (120u << 23));
}

INLINE uint8_t to_e4m3(float f) { /* 0 <= f <= 448 or NaN, ties to even */
    uint32_t u = bits(f), normal = ((u + 0x7ffff + (u >> 20 & 1)) >> 20) - (120 << 3);
    uint32_t small = bits(f + 0x1p14f) - bits(0x1p14f); /* a subnormal is a multiple of 2^-9 */
    return (uint8_t)(f != f ? 0x7f : f < 0x1p-6f ? small : normal);
}

INLINE float nearest(float f) { return (f + 0x1.8p23f) - 0x1.8p23f; } /* |f| < 2^22, ties to even */

INLINE float exponential(float x) { /* 1 ulp; Cephes' polynomial; straight code that vectorizes */
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f, p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f, p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f, p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * number((bits(shifted) - bits(0x1.8p23f) + 127) << 23);
}

INLINE float load(const void *p, int type, int64_t i) {
    return type == FP32 ? ((const float *)p)[i]
         : type == BF16 ? number((uint32_t)((const uint16_t *)p)[i] << 16) : from_f16(((const uint16_t *)p)[i]);
}

INLINE void store_all(void *p, int type, int64_t at, const float *v, int64_t n) {
    if (type == FP32) memcpy((float *)p + at, v, 4 * n);
    else if (type == BF16) for (int64_t i = 0; i < n; i++) ((uint16_t *)p)[at + i] = to_bf16(v[i]);
    else for (int64_t i = 0; i < n; i++) ((uint16_t *)p)[at + i] = to_f16(v[i]);
}

static const float E2M1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/* ---- what cpu.py passes: each struct field by field as there ---- */

typedef struct {
    const void *x;          /* rows: fp32, bf16, fp16 [x_rows, x_width], or codes [x_rows, x_width / 2] */
    const uint8_t *x_sf;    /* NVFP4: block scales in the 128x4 layout, groups padded to 128 rows */
    const float *x_scale;   /* NVFP4: [R] */
    const int32_t *index;   /* row r is x[index[r]]; or NULL */
    const int32_t *offsets; /* [E + 1] */
    const int32_t *target;  /* row r goes to out[target[r]]; or NULL */
    const uint8_t *codes, *sf;              /* [E, N, K/2], [E, N, K/16] */
    const float *first_scale, *rest_scale;  /* [E]: global scales of weight rows < split, and of the rest */
    const void *bias;       /* [E, N] or NULL */
    void *out;              /* [R, width] */
    int64_t x_type, x_rows, x_width, R, E, N, K, split, bias_type, out_type;
    int64_t paired;         /* weight rows n and n + split make one output (gate and up) */
    int64_t width;          /* of out: N, or N / 2 where paired */
    int64_t gate;
    float alpha, limit, up_offset;
    int32_t clamp_after;
    /* filled in by gemm() */
    void *rows;             /* x, even and odd elements apart */
    const int32_t *hit;     /* experts with tokens */
    const int64_t *padded;  /* NVFP4: where an expert's rows begin among the padded ones */
    int64_t tile, tiles, K_steps, stride, few;
    char *work;             /* scratch, work_bytes for each thread */
    int64_t work_bytes;
} Gemm;

typedef struct {
    const void *x;         /* fp32, bf16, fp16 [*, width] */
    const int32_t *index;  /* or NULL */
    const float *scale;    /* static: [E], or NULL */
    const int32_t *offsets;
    uint8_t *codes, *sf;   /* [R, K/2]; 128x4 layout, zeroed */
    float *row_scale;      /* [R] */
    int64_t x_type, width, K, R, E;
} Quantize;

typedef struct {
    const float *slots;    /* [T * top_k, H] */
    const void *weights;   /* [T, top_k] */
    void *out;             /* [T, H] */
    int64_t T, top_k, H, weights_type, out_type;
} Combine;

INLINE int64_t sf_offset(int64_t row, int64_t block, int64_t K16) { /* in the 128x4 layout */
    return (row / 128 * ((K16 + 3) / 4) + block / 4) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + block % 4;
}

INLINE int64_t expert_of(const int32_t *offsets, int64_t E, int64_t row) { /* E: nobody */
    int64_t low = 0, high = E;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (offsets[middle + 1] <= row) low = middle + 1; else high = middle;
    }
    return low;
}

static void padded_starts(const int32_t *offsets, int64_t E, int64_t *starts) {
    for (int64_t e = 0, at = 0; e < E; e++) {
        starts[e] = at - offsets[e]; /* row + starts[e] is the padded row */
        at += (offsets[e + 1] - offsets[e] + 127) / 128 * 128;
    }
}

/* ---- threads: the pool that torch uses (GOMP_parallel, of the OpenMP runtime torch has loaded) or, without one,
   threads made for the call. A second pool beside torch's would fight with its spinning threads. ---- */

typedef void Task(const void *problem, int64_t item, int thread);
typedef void Parallel(void (*)(void *), void *, unsigned threads, unsigned flags);
typedef struct { Task *task; const void *problem; int64_t items, run; atomic_long next; atomic_int threads; } Job;

static void work_off(void *argument) {
    Job *job = argument;
    int thread = atomic_fetch_add(&job->threads, 1);
    for (int64_t i; (i = atomic_fetch_add(&job->next, job->run)) < job->items;)
        for (int64_t j = i; j < MIN(i + job->run, job->items); j++) job->task(job->problem, j, thread);
}

static void *worker(void *argument) { work_off(argument); return NULL; }

static void run(Task *task, const void *problem, int64_t items, int64_t threads, Parallel *parallel) {
    threads = MIN(threads, MIN(items, MAX_THREADS));
    /* neighbours for one thread, so that what is prefetched beyond an item is its own */
    Job job = {.task = task, .problem = problem, .items = items, .run = threads ? items / (threads * 16) + 1 : 1};
    if (threads <= 1) { work_off(&job); return; }
    if (parallel) { parallel(work_off, &job, (unsigned)threads, 0); return; }
    pthread_t others[MAX_THREADS];
    int64_t made = 0;
    while (made < threads - 1 && !pthread_create(&others[made], NULL, worker, &job)) made++;
    work_off(&job);
    while (made) pthread_join(others[--made], NULL);
}

/* ---- the paths ----
   NR x NT    weight rows by tokens of a block of sums, as many as the registers hold
   STEP       elements of K decoded at once: two vectors M of multiplicands (element type Element)
   V          LANES fp32 sums
   decode     STEP codes -> even and odd elements, unscaled
   block_scales  16 block scales as fp32
   scales     the scale of every lane of V for one step
   mul_add    sums + a * b
   scaled     multiplicands * scales
   sum4       the sums of the lanes of four vectors  */

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(f) PASTE(f, PATH)

typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
INLINE void decode_portable(const uint8_t *c, v4 *even, v4 *odd) {
    *even = (v4){E2M1[c[0] & 15], E2M1[c[1] & 15], E2M1[c[2] & 15], E2M1[c[3] & 15]};
    *odd = (v4){E2M1[c[0] >> 4], E2M1[c[1] >> 4], E2M1[c[2] >> 4], E2M1[c[3] >> 4]};
}
INLINE void block_scales_portable(const uint8_t *sf, float *out) {
    for (int i = 0; i < 16; i++) out[i] = from_e4m3(sf[i]);
}
INLINE v4 scales_portable(const float *sf, int64_t k) { return (v4){0} + sf[k / 16]; }
INLINE v4 mul_add_portable(v4 sum, v4 a, v4 b) { return sum + a * b; }
INLINE v4 scaled_portable(v4 a, v4 s) { return a * s; }
INLINE void sum4_portable(v4 a, v4 b, v4 c, v4 d, float *out) {
    out[0] = (a[0] + a[1]) + (a[2] + a[3]), out[1] = (b[0] + b[1]) + (b[2] + b[3]);
    out[2] = (c[0] + c[1]) + (c[2] + c[3]), out[3] = (d[0] + d[1]) + (d[2] + d[3]);
}
#define PATH portable
#define TARGET
#define V v4
#define M v4
#define Element float
#define NR 4
#define NT 4
#include "cpu.c"

#if defined(__x86_64__)

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
#define TARGET __attribute__((target("avx2,fma,f16c")))
INLINE TARGET void decode_avx2(const uint8_t *c, v8 *even, v8 *odd) { /* a table of magnitudes, the sign from bit 3 */
    const __m256 table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i sign = _mm256_set1_epi32((int)0x80000000);
    __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)c));
    __m256 low = _mm256_permutevar8x32_ps(table, v), high = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(v, 4));
    *even = _mm256_xor_ps(low, _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(v, 28), sign)));
    *odd = _mm256_xor_ps(high, _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(v, 24), sign)));
}
/* As fp16, whose exponent is 8 larger; 0x7f is NaN. */
INLINE TARGET void block_scales_avx2(const uint8_t *sf, float *out) {
    __m256i v = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)sf)), 7);
    v = _mm256_or_si256(v, _mm256_cmpeq_epi16(v, _mm256_set1_epi16(0x7f << 7)));
    const __m256 unit = _mm256_set1_ps(0x1p8f);
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), unit));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)), unit));
}
#define block_scales_avx512 block_scales_avx2
#define block_scales_avx512bf16 block_scales_avx2
INLINE TARGET v8 scales_avx2(const float *sf, int64_t k) { return _mm256_broadcast_ss(sf + k / 16); }
INLINE TARGET v8 mul_add_avx2(v8 sum, v8 a, v8 b) { return _mm256_fmadd_ps(a, b, sum); }
INLINE TARGET v8 scaled_avx2(v8 a, v8 s) { return a * s; }
INLINE TARGET void sum4_avx2(v8 a, v8 b, v8 c, v8 d, float *out) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
#define PATH avx2
#define V v8
#define M v8
#define Element float
#define NR 4
#define NT 2
#include "cpu.c"

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
INLINE TARGET void decode_avx512(const uint8_t *c, v16 *even, v16 *odd) { /* the table reads 4 bits of each index */
    const __m512 table = _mm512_loadu_ps(E2M1);
    __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)c));
    *even = _mm512_permutexvar_ps(v, table);
    *odd = _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), table);
}
INLINE TARGET v16 scales_avx512(const float *sf, int64_t k) { /* 2 blocks: 8 lanes each */
    const __m512i pick = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m128 two = _mm_castpd_ps(_mm_load_sd((const double *)(sf + k / 16)));
    return _mm512_permutexvar_ps(pick, _mm512_castps128_ps512(two));
}
INLINE TARGET v16 mul_add_avx512(v16 sum, v16 a, v16 b) { return _mm512_fmadd_ps(a, b, sum); }
INLINE TARGET v16 scaled_avx512(v16 a, v16 s) { return a * s; }
INLINE TARGET void sum4_avx512(v16 a, v16 b, v16 c, v16 d, float *out) {
    v16 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    v16 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    v16 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#define PATH avx512
#define V v16
#define M v16
#define Element float
#define NR 4
#define NT 6
#include "cpu.c"

#if defined(__clang__) || __GNUC__ >= 10
#define HAS_BF16
typedef uint16_t h32 __attribute__((vector_size(64), aligned(2), may_alias));
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")))
/* Each 32-bit lane is two elements of one block, so a step is 4 blocks of 4 lanes. */
INLINE TARGET void decode_avx512bf16(const uint8_t *c, h32 *even, h32 *odd) { /* reads 5 bits, so the table is there twice */
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00, (short)0xbf80,
        (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0));
    __m512i v = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)c));
    *even = (h32)_mm512_permutexvar_epi16(v, table);
    *odd = (h32)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table);
}
INLINE TARGET v16 scales_avx512bf16(const float *sf, int64_t k) {
    const __m512i pick = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(sf + k / 16)), pick);
}
INLINE TARGET v16 mul_add_avx512bf16(v16 sum, h32 a, h32 b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
INLINE TARGET h32 scaled_avx512bf16(h32 a, v16 s) { /* as fp32; the product fits in bf16 */
    __m512i low = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32((__m512i)a, 16)), s));
    __m512i high = _mm512_castps_si512(_mm512_mul_ps(
        _mm512_castsi512_ps(_mm512_and_si512((__m512i)a, _mm512_set1_epi32((int)0xffff0000))), s));
    return (h32)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
}
#define sum4_avx512bf16 sum4_avx512
#define PATH avx512bf16
#define SHARES_REST
#define V v16
#define M h32
#define Element uint16_t
#define NR 4
#define NT 6
#include "cpu.c"
#endif
#endif

/* few: up to so many tokens of an expert, decoding in registers beats a dequantized tile */
typedef struct { Task *arrange, *item, *quantize, *combine; int64_t element, step, few; } Path;

static const Path PATHS[4] = {
    {arrange_portable, item_portable, quantize_portable, combine_portable, 4, 8, 4},
#if defined(__x86_64__)
    {arrange_avx2, item_avx2, quantize_avx2, combine_avx2, 4, 16, 4},
    {arrange_avx512, item_avx512, quantize_avx512, combine_avx512, 4, 32, 6},
#ifdef HAS_BF16
    {arrange_avx512bf16, item_avx512bf16, quantize_avx512, combine_avx512, 2, 64, 6},
#endif
#endif
};

/* Which paths this machine can run: bit i for PATHS[i]. */
int64_t paths(void) {
    int64_t can = 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) can |= 2;
    if (can & 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) can |= 4;
#ifdef HAS_BF16
    if (can & 4 && __builtin_cpu_supports("avx512bf16")) can |= 8;
#endif
#endif
    return can;
}

/* Returns 0, or -1 without memory. Rows of nobody become zeros. */
int64_t gemm(Gemm *g, int64_t path, int64_t threads, Parallel *parallel) {
    if (path == 3 && g->x_type != BF16 && g->x_type != NVFP4) path = 2;
    const Path *p = &PATHS[path];
    int64_t E = g->E, hits = 0, row_bytes = g->width * (g->out_type == FP32 ? 4 : 2);
    threads = MIN(threads, MAX_THREADS);

    for (int64_t r = g->offsets[E]; r < g->R; r++)
        memset((char *)g->out + (g->target ? g->target[r] : r) * row_bytes, 0, row_bytes);
    g->K_steps = (g->K + p->step - 1) / p->step * p->step;
    g->stride = g->K_steps + 64 / p->element; /* not a power of two: rows would share the sets of the cache */
    int64_t most = MIN(MAX_TILE, (384 << 10) / (g->K_steps * p->element)) / 8 * 8; /* what leaves room in L2 */
    g->tile = (most < 8 ? 8 : most) / (g->paired ? 2 : 1);
    g->tiles = (g->width + g->tile - 1) / g->tile;
    g->work_bytes = (MAX_TILE * (g->stride * p->element + 4 * 64) + 8 * g->K_steps + 4096) / 64 * 64;
    int64_t rows_bytes = (g->x_rows * g->stride * p->element + 63) / 64 * 64;
    char *memory = malloc(64 + rows_bytes + threads * g->work_bytes + E * 12);
    if (!memory) return -1;
    g->rows = memory + 64 - (uintptr_t)memory % 64;
    g->work = (char *)g->rows + rows_bytes;
    int64_t *padded = (int64_t *)(g->work + threads * g->work_bytes);
    int32_t *hit = (int32_t *)(padded + E);
    padded_starts(g->offsets, E, padded);
    for (int64_t e = 0; e < E; e++)
        if (g->offsets[e + 1] > g->offsets[e]) hit[hits++] = (int32_t)e;
    g->hit = hit, g->padded = padded, g->few = p->few;

    run(p->arrange, g, g->x_rows, g->x_rows * g->K < 1 << 14 ? 1 : threads, parallel);
    run(p->item, g, hits * g->tiles, threads, parallel);
    free(memory);
    return 0;
}

int64_t quantize(Quantize *q, int64_t path, int64_t threads, Parallel *parallel) {
    run(PATHS[path].quantize, q, q->R, q->R * q->K < 1 << 14 ? 1 : threads, parallel);
    return 0;
}

int64_t combine(Combine *c, int64_t path, int64_t threads, Parallel *parallel) {
    run(PATHS[path].combine, c, c->T, c->T * c->top_k * c->H < 1 << 15 ? 1 : threads, parallel);
    return 0;
}

#else /* ---- once for each path ---- */

#define LANES ((int64_t)(sizeof(V) / 4))
#define HALF ((int64_t)(sizeof(M) / sizeof(Element)))
#define STEP (2 * HALF)

INLINE TARGET M NAME(at)(const Element *p) { return *(const M *)p; } /* not memcpy: GCC takes that apart */

/* sums[r][t] += codes[r][k .. k + STEP) . x[t], scaled block by block */
INLINE TARGET void NAME(step)(int nr, int nt, const uint8_t *const *codes, const float *const *sf, int64_t k,
                              const Element *const *x, V sums[NR][NT], int64_t ahead) {
    UNROLL for (int r = 0; r < nr; r++) {
        M even, odd;
        __builtin_prefetch(codes[r] + ahead);
        NAME(decode)(codes[r], &even, &odd);
        V scale = NAME(scales)(sf[r], k);
        UNROLL for (int t = 0; t < nt; t++) {
            V part = NAME(mul_add)((V){0}, even, NAME(at)(x[t] + k));
            part = NAME(mul_add)(part, odd, NAME(at)(x[t] + k + HALF));
            sums[r][t] += part * scale;
        }
    }
}

/* NR weight rows, decoded on the way, by nt tokens: out[t * MAX_TILE + r] */
INLINE TARGET void NAME(dot_codes)(int nt, const uint8_t *const *codes, const float *const *sf, int64_t K,
                                   const Element *const *x, float *out) {
    V sums[NR][NT];
    UNROLL for (int r = 0; r < NR; r++) UNROLL for (int t = 0; t < nt; t++) sums[r][t] = (V){0};
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) {
        const uint8_t *now[NR];
        UNROLL for (int r = 0; r < NR; r++) now[r] = codes[r] + k / 2;
        NAME(step)(NR, nt, now, sf, k, x, sums, NR * K / 2);
    }
    if (k < K) { /* the last codes, with zeros up to a whole step */
        uint8_t tail[NR][STEP / 2];
        const uint8_t *now[NR];
        memset(tail, 0, sizeof tail);
        UNROLL for (int r = 0; r < NR; r++) memcpy(tail[r], codes[r] + k / 2, (K - k) / 2), now[r] = tail[r];
        NAME(step)(NR, nt, now, sf, k, x, sums, 0);
    }
    UNROLL for (int t = 0; t < nt; t++)
        NAME(sum4)(sums[0][t], sums[1][t], sums[2][t], sums[3][t], out + t * MAX_TILE);
}

/* NR dequantized rows, from column k to `end`, by nt tokens: out += */
INLINE TARGET void NAME(dot_tile)(int nt, const Element *tile, int64_t stride, int64_t k, int64_t end,
                                  const Element *const *x, float *out) {
    V sums[NR][NT];
    UNROLL for (int r = 0; r < NR; r++) UNROLL for (int t = 0; t < nt; t++) sums[r][t] = (V){0};
    for (; k < end; k += HALF) {
        M w[NR];
        UNROLL for (int r = 0; r < NR; r++) w[r] = NAME(at)(tile + r * stride + k);
        UNROLL for (int t = 0; t < nt; t++) {
            M v = NAME(at)(x[t] + k);
            UNROLL for (int r = 0; r < NR; r++) sums[r][t] = NAME(mul_add)(sums[r][t], w[r], v);
        }
    }
    UNROLL for (int t = 0; t < nt; t++) {
        float part[NR];
        NAME(sum4)(sums[0][t], sums[1][t], sums[2][t], sums[3][t], part);
        *(v4 *)(out + t * MAX_TILE) += *(v4 *)part;
    }
}

#if NT == 2
#define EACH_NT(CASE) CASE(1) CASE(2)
#elif NT == 4
#define EACH_NT(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#else
#define EACH_NT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif
static TARGET void NAME(block_of_codes)(int nt, const uint8_t *const *codes, const float *const *sf, int64_t K,
                                        const Element *const *x, float *out) {
#define CASE(n) case n: NAME(dot_codes)(n, codes, sf, K, x, out); break;
    switch (nt) { EACH_NT(CASE) }
#undef CASE
}
static TARGET void NAME(block_of_tile)(int nt, const Element *tile, int64_t stride, int64_t k, int64_t end,
                                       const Element *const *x, float *out) {
#define CASE(n) case n: NAME(dot_tile)(n, tile, stride, k, end, x, out); break;
    switch (nt) { EACH_NT(CASE) }
#undef CASE
}

/* The scales of a weight row as fp32, then zeros up to a multiple of 16. */
INLINE TARGET void NAME(row_scales)(const Gemm *g, int64_t row, float *out) {
    int64_t n = g->K / 16, i = 0;
    const uint8_t *sf = g->sf + row * n;
    for (; i + 16 <= n; i += 16) {
        __builtin_prefetch(sf + 2 * NR * n + i);
        NAME(block_scales)(sf + i, out + i);
    }
    if (i == n) return;
    uint8_t tail[16] = {0};
    memcpy(tail, sf + i, n - i);
    NAME(block_scales)(tail, out + i);
}

static TARGET void NAME(dequantize)(const Gemm *g, int64_t row, const float *sf, Element *out) {
    const uint8_t *codes = g->codes + row * g->K / 2;
    for (int64_t k = 0; k < g->K_steps; k += STEP) {
        uint8_t tail[STEP / 2] = {0};
        const uint8_t *now = codes + k / 2;
        if (k + STEP > g->K) memcpy(tail, now, (g->K - k) / 2), now = tail;
        M even, odd;
        NAME(decode)(now, &even, &odd);
        V scale = NAME(scales)(sf, k);
        even = NAME(scaled)(even, scale), odd = NAME(scaled)(odd, scale);
        *(M *)(out + k) = even, *(M *)(out + k + HALF) = odd;
    }
}

/* Scales, bias and gate of one row: v [columns] -> v [n]. */
static TARGET void NAME(finish)(const Gemm *g, const float *scale, float x_scale, const float *bias, int64_t columns,
                                int64_t n, float *v) {
    for (int64_t j = 0; j < columns; j++) v[j] = v[j] * scale[j] * x_scale + bias[j];
    if (g->gate == RELU2)
        for (int64_t j = 0; j < n; j++) v[j] = v[j] < 0 ? 0 : v[j] * v[j];
    if (!g->paired) return;
    float limit = g->limit, before = g->clamp_after ? __builtin_inff() : limit;
    float after = g->clamp_after ? limit : __builtin_inff();
    for (int64_t j = 0; j < n; j++) {
        float a = v[j] > before ? before : v[j], u = v[n + j];
        u = u > limit ? limit : u < -limit ? -limit : u;
        /* gelu's (1 + tanh(z)) / 2 is sigmoid(2z) */
        float z = g->gate == SILU ? g->alpha * a : 1.5957691216f * (a + 0.044715f * a * a * a);
        a = a / (1.0f + exponential(-z));
        a = a > after ? after : a;
        v[j] = a * (u + g->up_offset);
    }
}

/* One tile of one expert's weight rows by all its tokens. */
static TARGET void NAME(item)(const void *problem, int64_t i, int thread) {
    const Gemm *g = problem;
    int64_t e = g->hit[i / g->tiles], n0 = i % g->tiles * g->tile, n = MIN(g->tile, g->width - n0);
    int64_t columns = g->paired ? 2 * n : n, first = g->offsets[e], tokens = g->offsets[e + 1] - first;
    int64_t row[MAX_TILE + NR];
    float scale[MAX_TILE + NR], bias[MAX_TILE + NR];
    for (int64_t j = 0; j < columns + NR; j++) { /* the last one again, so that blocks of NR are whole */
        int64_t c = MIN(j, columns - 1);
        row[j] = c < n ? n0 + c : g->split + n0 + c - n;
        scale[j] = row[j] < g->split ? g->first_scale[e] : g->rest_scale[e];
        bias[j] = g->bias ? load(g->bias, (int)g->bias_type, e * g->N + row[j]) : 0;
    }
    Element *tile = (Element *)(g->work + thread * g->work_bytes);
    float *scales = (float *)(tile + MAX_TILE * g->stride), out[NT * MAX_TILE];
    int64_t K16 = (g->K_steps / 16 + 15) / 16 * 16;
    int many = tokens > g->few;
    if (many)
        for (int64_t j = 0; j < (columns + NR - 1) / NR * NR; j++) {
            NAME(row_scales)(g, e * g->N + row[j], scales);
            NAME(dequantize)(g, e * g->N + row[j], scales, tile + j * g->stride);
        }
    for (int64_t t0 = 0; t0 < tokens; t0 += NT) {
        int nt = (int)MIN(NT, tokens - t0);
        const Element *x[NT];
        for (int t = 0; t < nt; t++) {
            int64_t r = first + t0 + t;
            x[t] = (const Element *)g->rows + (g->index ? g->index[r] : r) * g->stride;
        }
        if (many) { /* in blocks of K, so that x stays in L1 for all weight rows */
            memset(out, 0, sizeof out);
            for (int64_t k = 0, end; k < g->K_steps; k = end) {
                end = MIN(k + K_BLOCK / (int64_t)sizeof(Element), g->K_steps);
                for (int64_t j = 0; j < columns; j += NR)
                    NAME(block_of_tile)(nt, tile + j * g->stride, g->stride, k, end, x, out + j);
            }
        } else for (int64_t j = 0; j < columns; j += NR) {
            const uint8_t *codes[NR];
            const float *sf[NR];
            for (int r = 0; r < NR; r++) {
                int64_t at = e * g->N + row[j + r];
                NAME(row_scales)(g, at, scales + r * K16);
                sf[r] = scales + r * K16, codes[r] = g->codes + at * g->K / 2;
            }
            NAME(block_of_codes)(nt, codes, sf, g->K, x, out + j);
        }
        for (int t = 0; t < nt; t++) {
            int64_t r = first + t0 + t;
            NAME(finish)(g, scale, g->x_scale ? g->x_scale[r] : 1.0f, bias, columns, n, out + t * MAX_TILE);
            int64_t to = (g->target ? g->target[r] : r) * g->width + n0;
            store_all(g->out, (int)g->out_type, to, out + t * MAX_TILE, n);
        }
    }
}

/* n elements of x from `at` on as fp32, zeros where they are not among the first `width` */
static TARGET void NAME(expand)(const void *x, int type, int64_t at, int64_t width, int64_t n, float *out) {
    const uint16_t *half = (const uint16_t *)x + at;
    int64_t have = MIN(width, n);
    if (type == FP32) memcpy(out, (const float *)x + at, 4 * have);
    else if (type == BF16) for (int64_t k = 0; k < have; k++) out[k] = number((uint32_t)half[k] << 16);
    else for (int64_t k = 0; k < have; k++) out[k] = from_f16(half[k]);
    for (int64_t k = have; k < n; k++) out[k] = 0;
}

/* Row r of x -> g->rows: steps of even, then odd elements. */
static TARGET void NAME(arrange)(const void *problem, int64_t r, int thread) {
    const Gemm *g = problem;
    float *v = (float *)(g->work + thread * g->work_bytes);
    if (g->x_type == NVFP4) {
        const uint8_t *codes = (const uint8_t *)g->x + r * g->x_width / 2;
        int64_t e = expert_of(g->offsets, g->E, r), K16 = g->x_width / 16;
        if (e == g->E) return;
        for (int64_t b = 0; b < K16; b++) {
            float sf = from_e4m3(g->x_sf[sf_offset(r + g->padded[e], b, K16)]);
            for (int64_t i = 0; i < 8; i++) {
                v[16 * b + 2 * i] = E2M1[codes[8 * b + i] & 15] * sf;
                v[16 * b + 2 * i + 1] = E2M1[codes[8 * b + i] >> 4] * sf;
            }
        }
        for (int64_t k = g->x_width; k < g->K_steps; k++) v[k] = 0;
    } else NAME(expand)(g->x, (int)g->x_type, r * g->x_width, g->x_width, g->K_steps, v);
    Element *out = (Element *)g->rows + r * g->stride;
    for (int64_t k = 0; k < g->K_steps; k += STEP)
        for (int64_t i = 0; i < HALF; i++) {
            float even = v[k + 2 * i], odd = v[k + 2 * i + 1];
            if (sizeof(Element) == 4) out[k + i] = (Element)even, out[k + HALF + i] = (Element)odd;
            else out[k + i] = (Element)(bits(even) >> 16), out[k + HALF + i] = (Element)(bits(odd) >> 16);
        }
}

#ifndef SHARES_REST /* avx512bf16 takes these from avx512 */

/* Row r -> NVFP4, to the bit what format.quantize makes: true divisions, ties to even, NaN in sf. */
static TARGET void NAME(quantize)(const void *problem, int64_t r, int thread) {
    (void)thread;
    const Quantize *q = problem;
    int64_t K16 = q->K / 16, from = (q->index ? q->index[r] : r) * q->width, padded = r;
    int64_t e = expert_of(q->offsets, q->E, r);
    for (int64_t i = 0; i < e; i++) padded += (q->offsets[i] - q->offsets[i + 1]) & 127;
    float x[512], gs = 1.0f;
    if (q->scale) {
        if (e < q->E) gs = q->scale[e];
    } else {
        uint32_t amax = 0; /* as bits: the order of magnitudes, with NaN above infinity */
        for (int64_t k = 0; k < q->width; k += 512) {
            NAME(expand)(q->x, (int)q->x_type, from + k, q->width - k, 512, x);
            for (int64_t i = 0; i < 512; i++) amax = (bits(x[i]) & 0x7fffffff) > amax ? bits(x[i]) & 0x7fffffff : amax;
        }
        gs = number(amax) / 2688.0f;
        gs = amax == 0 ? 1.0f : gs < 0x1p-126f ? 0x1p-126f : gs;
    }
    q->row_scale[r] = gs;
    for (int64_t b = 0; b < K16; b++) {
        int64_t k = 16 * b;
        if (k % 512 == 0) NAME(expand)(q->x, (int)q->x_type, from + k, q->width - k, 512, x);
        const float *block = x + k % 512;
        uint32_t largest = 0;
        for (int64_t i = 0; i < 16; i++)
            largest = (bits(block[i]) & 0x7fffffff) > largest ? bits(block[i]) & 0x7fffffff : largest;
        float sf = number(largest) / 6.0f / gs, c[16];
        uint8_t byte = to_e4m3(sf > 448.0f ? 448.0f : sf), code[16];
        float scale = byte ? from_e4m3(byte) * gs : __builtin_inff();
        for (int64_t i = 0; i < 16; i++) { /* see format._encode: three lines, the lowest one holds */
            float a = __builtin_fabsf(block[i]) / scale;
            a = a > 8.0f ? 8.0f : a;
            float one = nearest(a * 2), two = nearest(a) + 2, three = nearest(a * 0.5f) + 4;
            c[i] = MIN(MIN(one, two), MIN(three, 7.0f));
        }
        for (int64_t i = 0; i < 16; i++)
            code[i] = (uint8_t)((bits(c[i] + 0x1p23f) & 7) | (byte && block[i] < 0 ? 8 : 0));
        for (int64_t i = 0; i < 8; i++)
            q->codes[(r * q->K + k) / 2 + i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
        if (e < q->E) q->sf[sf_offset(padded, b, K16)] = byte;
    }
}

/* Token t: its slots weighted and added in fp32, in order. */
static TARGET void NAME(combine)(const void *problem, int64_t t, int thread) {
    (void)thread;
    const Combine *c = problem;
    float sum[256];
    for (int64_t h = 0; h < c->H; h += 256) {
        int64_t n = MIN(256, c->H - h);
        memset(sum, 0, sizeof sum);
        for (int64_t j = 0; j < c->top_k; j++) {
            float weight = load(c->weights, (int)c->weights_type, t * c->top_k + j);
            const float *slot = c->slots + (t * c->top_k + j) * c->H + h;
            for (int64_t i = 0; i < n; i++) sum[i] += weight * slot[i];
        }
        store_all(c->out, (int)c->out_type, t * c->H + h, sum, n);
    }
}
#endif

#undef LANES
#undef EACH_NT
#undef HALF
#undef STEP
#undef PATH
#undef SHARES_REST
#undef TARGET
#undef V
#undef M
#undef Element
#undef NR
#undef NT
#endif
