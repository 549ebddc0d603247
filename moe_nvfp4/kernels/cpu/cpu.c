/* The CPU backend (backend.py compiles this file and calls run): the stages and their threads, and what the loops of
   cpu_path.h are made of on each instruction set.

   Layout. A weight row is K codes (e2m1, two to a byte, low nibble = even k) and K/16 block scales
   (e4m3 bytes). The decoder turns its codes into PLANES vectors: element i of a step of STEP elements
   is in plane i % PLANES (for two planes: the even and the odd elements). The token side x is stored in the same way,
   once per stage: the planes of each step, with zeros up to a whole step. So nothing is interleaved inside the loops.

   Loops. out[row, n] = sum_k code[n, k] * sf[n, k/16] * x[row, k] in fp32. The work items of a GEMM
   are (expert, tile of 64 weight rows); none ever splits K between threads, so the result does not
   depend on their number.
   - few tokens for an expert: dot_codes decodes in registers, NR weight rows by up to NT tokens, with
     lanes along K that are added at the end. The sum over a block is multiplied by the block's scale,
     so weights cost 4.5 bits of memory each;
   - many tokens: blocks of the tile, 64 rows by K_BLOCK, are dequantized (code * sf is exact) into the
     L1 cache with the rows side by side in the lanes, and each element of x, broadcast, is multiplied by
     NP vectors of them: no sums over lanes, and few loads per multiplication. In avx512bf16 the
     first tokens, up to LEAD, are multiplied while the weights are still in the registers where they are
     decoded, which hides most of the decoding behind these multiplications.

   Paths. cpu_path.h is compiled once for each instruction set, with the macros that precede its
   inclusion here: portable (vector extensions of the compiler), avx2, avx512, avx512bf16, amx and, on ARM, neon. In
   avx512bf16 and amx, x and the dequantized weights are bf16 without rounding: these paths take rows that are bf16 or
   NVFP4 (code * sf has 6 significant bits), and backend.py gives other rows to avx512. In amx, many tokens are
   multiplied in tiles of 16 tokens by 32 elements of K by 16 weight rows; both sides are laid out for that first. Few
   tokens are multiplied there as integers of 16 bits, for each block of x.  */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cpu_detect.c"
#include "cpu_threads.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

enum { FP32, BF16, FP16, NVFP4 };          /* element types, as backend.py numbers them */
enum { RAW, RELU2, SILU, GELU_TANH };      /* gate kinds */
enum { GROUP, QUANTIZE, GEMM, COMBINE, LOW_RANK }; /* stages */
enum { TILE = 64, K_BLOCK = 256, CHUNK = 256, MAX_STAGES = 8 }; /* rows, elements, tokens */

/* ---- numbers ---- */

INLINE uint32_t bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE float number(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

#ifdef HAS_AMX
#include "cpu_amx.h"
#endif

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

INLINE uint32_t largest_of(const float *block) { /* the largest magnitude, as bits: NaN is above infinity */
    uint32_t m[16];
    for (int i = 0; i < 16; i++) m[i] = bits(block[i]) & 0x7fffffff;
    for (int n = 8; n; n /= 2) for (int i = 0; i < n; i++) m[i] = m[i] > m[n + i] ? m[i] : m[n + i];
    return m[0];
}

/* The scales that give the largest magnitudes of 32 blocks, passed as bits, this code. */
INLINE void scales_by_code(const uint32_t *largest, float code, float gs, uint8_t *sf) {
    for (int i = 0; i < 32; i++) {
        float ratio = number(largest[i]) / code / gs;
        sf[i] = to_e4m3(ratio > 448.0f ? 448.0f : ratio);
    }
}

/* A block's codes, two to a byte: the lowest of three lines, see format._encode. */
INLINE void encode_block(const float *block, uint8_t sf, float gs, uint8_t *codes) {
    float scale = sf ? from_e4m3(sf) * gs : __builtin_inff();
    uint32_t below_zero = sf ? 8 : 0;
    union { uint32_t one[16]; uint64_t two[8]; } code;
    for (int i = 0; i < 16; i++) {
        float a = __builtin_fabsf(block[i]) / scale;
        a = a > 8.0f ? 8.0f : a;
        float one = nearest(a * 2), two = nearest(a) + 2, three = nearest(a * 0.5f) + 4, c = MIN(MIN(one, two), MIN(three, 7.0f));
        code.one[i] = (bits(c + 0x1p23f) & 7) | (block[i] < 0 ? below_zero : 0);
    }
    __asm__("" : "+m"(code)); /* else gcc takes the vectors apart for the next loop */
    for (int i = 0; i < 8; i++) codes[i] = (uint8_t)(code.two[i] | code.two[i] >> 28);
}

/* format._squared_error of 32 blocks with these scales, in units of 2^-20; only the first n are used. The product is
   exact before it is rounded, and everything after it is exact too, so it does not matter what a compiler fuses. */
INLINE void squared_errors(const float *x, const uint8_t *sf, float gs, int64_t n, float *errors) {
    float inverse[32];
    int32_t sums[32] = {0};
    for (int b = 0; b < 32; b++) inverse[b] = 1.0f / (from_e4m3(sf[b]) * gs);
    for (int64_t b = 0; b < n; b++) for (int i = 0; i < 16; i++) {
        float a = (float)((double)__builtin_fabsf(x[16 * b + i]) * inverse[b] + 0x1.8p42 - 0x1.8p42);
        float one = nearest(a * 2) * 0.5f, two = nearest(a), three = nearest(a * 0.5f) * 2, c = a < 2 ? one : a < 4 ? two : three;
        int32_t d = (int32_t)((a - MIN(c, 6.0f)) * 0x1p10f);
        sums[b] += d * d;
    }
    for (int b = 0; b < 32; b++) errors[b] = (float)sums[b] * (from_e4m3(sf[b]) * from_e4m3(sf[b]));
}

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

INLINE void load_all(const void *p, int type, int64_t at, float *v, int64_t n) {
    if (type == FP32) memcpy(v, (const float *)p + at, 4 * n);
    else if (type == BF16) for (int64_t i = 0; i < n; i++) v[i] = number((uint32_t)((const uint16_t *)p)[at + i] << 16);
    else for (int64_t i = 0; i < n; i++) v[i] = from_f16(((const uint16_t *)p)[at + i]);
}

/* The sum of a[i] * b[i], in `lanes` (at most 32) sums side by side. */
INLINE float dot(const float *a, const float *b, int64_t n, int lanes) {
    float sums[32] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) for (int l = 0; l < lanes; l++) sums[l] += a[i + l] * b[i + l];
    for (; i < n; i++) sum += a[i] * b[i];
    for (int l = 0; l < lanes; l++) sum += sums[l];
    return sum;
}

INLINE void store_all(void *p, int type, int64_t at, const float *v, int64_t n) {
    if (type == FP32) memcpy((float *)p + at, v, 4 * n);
    else if (type == BF16) for (int64_t i = 0; i < n; i++) ((uint16_t *)p)[at + i] = to_bf16(v[i]);
    else for (int64_t i = 0; i < n; i++) ((uint16_t *)p)[at + i] = to_f16(v[i]);
}

static const float E2M1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

/* ---- what backend.py passes: its structs have the same fields ---- */

typedef struct {
    const void *x;          /* rows: fp32, bf16, fp16 [x_rows, x_width], or codes [x_rows, x_width / 2] */
    const uint8_t *x_sf;    /* NVFP4: block scales in the 128x4 layout, groups padded to 128 rows */
    const float *x_scale;   /* NVFP4: [R] */
    const int32_t *index;   /* row r is x[index[r]]; or NULL */
    const int32_t *offsets; /* [E + 1] */
    const int32_t *target;  /* row r goes to out[target[r]]; or NULL */
    const uint8_t *codes, *sf;              /* [E, N, K/2], [E, N, K/16]; or see `parts` */
    const float *first_scale, *rest_scale;  /* [E]: global scales of weight rows < split, and of the rest */
    const void *bias;       /* [E, N] or NULL */
    void *out;              /* [R, width] */
    int64_t x_type, x_rows, x_width, R, E, N, K, split, bias_type, out_type;
    int64_t paired;         /* weight rows n and n + split make one output (gate and up) */
    int64_t width;          /* of out: N, or N / 2 where paired */
    int64_t gate;
    int64_t parts;          /* 0; or, for mapped files: codes is [E, parts, 2], the sealed addresses of the codes and of
                               the block scales of each half (parts = 2) or of all (1) of an expert's rows; sf is NULL */
    int64_t known;          /* mapped: whether the system tells which pages are in memory (see `there`) */
    float alpha, limit, up_offset;
    int32_t clamp_after;
    /* filled in by measure(), add_gemm() and run() */
    void *rows;             /* x, in planes */
    char *integers;         /* amx: of x, for experts with few tokens */
    void *leads;            /* the first tokens of experts with many, side by side */
    int32_t *hit;           /* experts with tokens */
    int64_t *padded;        /* NVFP4: where an expert's rows begin among the padded ones */
    int32_t *few_at;        /* where those of an expert with few tokens begin in `integers`, without `index` */
    int64_t integer_stride; /* bytes of a row there */
    int64_t tile, tiles, K_steps, stride;
    int64_t few, few_rows, many_rows; /* up to how many tokens are few; rows of experts with few and with many */
    int64_t by_tile;        /* 0: items are ordered by expert, then by tile; else how many of hit there are, and the same
                               part of every expert belongs to neighbouring items */
    uint8_t *there;         /* mapped: for each of hit, whether each of its 2 * parts matrices is in memory */
    _Atomic int64_t *lost;  /* mapped: becomes 1 if memory has no file behind it any more, 2 if an address was edited */
    char *work;             /* scratch, work_bytes for each thread */
    int64_t work_bytes;
} Gemm;

typedef struct {
    const int64_t *ids;    /* [T, top_k] */
    int32_t *order, *token, *offsets;       /* as routing.Groups: [R], order / top_k, [E + 1] */
    int64_t R, top_k, E;
} Group;

typedef struct {
    const void *x;         /* fp32, bf16, fp16 [*, width] */
    const int32_t *index;  /* or NULL */
    const float *scale;    /* static: [E], or NULL */
    const int32_t *offsets;
    uint8_t *codes, *sf;   /* [R, K/2]; 128x4 layout, zeroed */
    float *row_scale;      /* [R] */
    int64_t x_type, x_rows, width, K, R, E;
    int64_t four_over_six; /* see format._four_over_six */
    /* filled in by measure_quantize() and run() */
    uint8_t *work;         /* scratch, work_bytes for each thread */
    int64_t work_bytes;
    uint8_t *tokens;       /* if several rows are copies of one row of x: the rows of x, quantized; or NULL */
} Quantize;

typedef struct {
    const float *slots;    /* [T * top_k, H] */
    const void *weights;   /* [T, top_k] */
    void *out;             /* [T, H] */
    int64_t T, top_k, H, weights_type, out_type;
} Combine;

typedef struct {
    const void *x;          /* [x_rows, K] */
    const void *a, *b;      /* [G, rank, K] and [G, N, rank], of x's type */
    const int32_t *offsets; /* [G + 1]: rows that share matrices */
    const uint8_t *bare;    /* [R]: rows to which nothing is added; or NULL */
    const int32_t *index;   /* row r is x[index[r] / slots]; or NULL */
    const int32_t *target;  /* row r is added to out[target[r]]; or NULL */
    float *low;             /* [R, rank], in between */
    void *out;              /* [R, N], of x's type */
    int64_t type, x_rows, R, G, K, N, rank, slots;
} LowRank;

/* How many bytes of each struct backend.py fills, in the order of the stages. It compares them with its own structs. */
_Static_assert(sizeof(void *) == 8, "pointers and integers travel as 8-byte words");
_Static_assert(sizeof(Group) == 7 * 8 && sizeof(Combine) == 8 * 8 && sizeof(LowRank) == 17 * 8, "no padding");
_Static_assert(offsetof(Quantize, work) == 14 * 8 && offsetof(Gemm, rows) == 29 * 8, "no padding");
void stage_bytes(int64_t *bytes) {
    bytes[GROUP] = sizeof(Group), bytes[QUANTIZE] = offsetof(Quantize, work);
    bytes[GEMM] = offsetof(Gemm, rows), bytes[COMBINE] = sizeof(Combine), bytes[LOW_RANK] = sizeof(LowRank);
}

INLINE int64_t sf_offset(int64_t row, int64_t block, int64_t K16) { /* in the 128x4 layout */
    return (row / 128 * ((K16 + 3) / 4) + block / 4) * 512 + row % 32 * 16 + row / 32 % 4 * 4 + block % 4;
}

INLINE int64_t expert_of(const int32_t *offsets, int64_t E, int64_t row) { /* E: unrouted */
    int64_t low = 0, high = E;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (offsets[middle + 1] <= row) low = middle + 1; else high = middle;
    }
    return low;
}

/* Where row r of x is among the integers; -1: no expert with few tokens reads it. */
INLINE int64_t integers_at(const Gemm *g, int64_t r) {
    if (!g->few_rows || g->index) return g->few_rows ? r : -1;
    int64_t e = expert_of(g->offsets, g->E, r);
    return e == g->E || g->offsets[e + 1] - g->offsets[e] > g->few ? -1 : g->few_at[e] + r - g->offsets[e];
}

/* Which group a row of an adapter belongs to; -1: nothing is added to it. */
INLINE int64_t group_of(const LowRank *l, int64_t row) {
    int64_t g = expert_of(l->offsets, l->G, row);
    return g == l->G || (l->bare && l->bare[row]) ? -1 : g;
}

/* How many of the tokens are multiplied while the weights are decoded: as many as the registers have room for. */
enum { LEAD = 20 };
INLINE int64_t lead_of(int64_t tokens) { return tokens <= LEAD ? tokens : 16; }

/* A token's codes, block scales and global scale. */
INLINE int64_t token_bytes(const Quantize *q) { return (q->K / 16 * 9 + 4 + 63) / 64 * 64; }

static void padded_starts(const int32_t *offsets, int64_t E, int64_t *starts) {
    for (int64_t e = 0, at = 0; e < E; e++) {
        starts[e] = at - offsets[e]; /* row + starts[e] is the padded row */
        at += (offsets[e + 1] - offsets[e] + 127) / 128 * 128;
    }
}

/* ---- the loops of an instruction set ---- */

typedef struct {
    Task *arrange, *weave, *item, *quantize, *quantize_token, *combine, *shrink_rows, *expand_rows; /* weave: or NULL */
    int64_t element, step, few, integers; /* bytes of an Element, STEP, FEW, INTEGERS */
} Path;

/* A token's result is computed in parts, so that a single token is not left to one thread. */
enum { PART = 512 };
INLINE int64_t parts_of(int64_t columns) { return (columns + PART - 1) / PART; }

/* Entry i of a table of mapped.py: an address in 48 bits, under 16 bits that tell whether anybody edited the entry (an
   average of weights, say), which would end in a SIGSEGV or in other weights. */
INLINE const uint8_t *address(const uint64_t *table, int64_t i) { return (const uint8_t *)(table[i] << 16 >> 16); }
INLINE int edited(const uint64_t *table, int64_t i) {
    return (((table[i] << 16 >> 16) * 0x9e3779b97f4a7c15u >> 48) ^ 0x5ea1) != table[i] >> 48;
}

/* Where a weight row's codes and block scales lie, and where the memory of the block scales ends. */
typedef struct { const uint8_t *codes, *sf, *end; } Row;

/* Row n of expert e. */
INLINE Row row_at(const Gemm *g, int64_t e, int64_t n) {
    const uint8_t *codes = g->codes, *sf = g->sf;
    int64_t row = e * g->N + n, rows = g->E * g->N;
    if (g->parts) {
        int64_t part = (rows = g->parts == 2 ? g->N / 2 : g->N) <= n;
        const uint64_t *at = (const uint64_t *)(const void *)g->codes + 2 * (e * g->parts + part);
        codes = address(at, 0), sf = address(at, 1), row = n - part * rows;
    }
    return (Row){codes + row * g->K / 2, sf + row * g->K / 16, sf + rows * g->K / 16};
}

INLINE int64_t hit_of(const Gemm *g, int64_t item) { return g->by_tile ? item % g->by_tile : item / g->tiles; }
INLINE int64_t first_row(const Gemm *g, int64_t item) {
    return (g->by_tile ? item / g->by_tile : item % g->tiles) * g->tile;
}

/* The first weight row of a GEMM's item; if rows are paired, of its gate rows (half 0) or up rows (half 1). */
INLINE Row item_at(const Gemm *g, int64_t item, int half) {
    return row_at(g, g->hit[hit_of(g, item)], first_row(g, item) + half * g->split);
}

/* Prefetches `part` / K of an item's tile, from k / K of it on, straight through its memory: in the order in which
   `block` reads it, 128 bytes here and there, it would come far too slowly. */
INLINE void prefetch_tile(const Gemm *g, int64_t item, int64_t k, int64_t part) {
    for (int half = 0; half <= g->paired; half++) {
        Row row = item_at(g, item, half);
        int64_t code_bytes = g->tile * part / 2, sf_bytes = g->tile * part / 16;
        const uint8_t *codes = row.codes + g->tile * k / 2, *sf = row.sf + g->tile * k / 16;
        for (int64_t i = 0; i < code_bytes; i += 64) __builtin_prefetch(codes + i);
        for (int64_t i = 0; i < sf_bytes; i += 64) __builtin_prefetch(sf + i);
    }
}

/* Prefetches up to AHEAD bytes of an item's rows from memory into the L2 cache. */
enum { AHEAD = 128 << 10 };
static void fetch_tile(const void *problem, int64_t item) {
    const Gemm *g = problem;
    int64_t rows = MIN(g->tile, AHEAD / (g->K / 16 * 9 * (1 + g->paired)));
    for (int half = 0; half <= g->paired; half++) {
        Row row = item_at(g, item, half);
        for (int64_t i = 0; i < rows * g->K / 2; i += 64) __builtin_prefetch(row.codes + i, 0, 2);
        for (int64_t i = 0; i < rows * g->K / 16; i += 64) __builtin_prefetch(row.sf + i, 0, 2);
    }
}

#include "cpu_mapped.h"

/* ---- the paths ----
   NR x NT    weight rows by tokens in dot_codes: as many sums as the registers hold
   NP x NX    vectors of weight rows by tokens in multiply: as many sums as the registers hold
   STEP       elements of K decoded at once: PLANES vectors M of multiplicands (element type Element)
   V          LANES fp32 sums
   decode     STEP codes -> their planes, unscaled
   block_scales  16 block scales as fp32
   scales     the scale of every lane of V for one step
   mul_add    sums + a * b
   spread     32 bits of x in every lane
   transpose  LANES bytes of LANES rows, row by row -> byte by byte
   stage, pairs, weave  see their definitions (avx512bf16 and amx)
   sum4       for each of four vectors, the sum of its lanes
   NUMBER     of the path, as backend.py numbers them
   FEW        the largest number of tokens per expert for which dot_codes is faster than multiply
   INTEGERS   in amx: bytes of a row of x per element, as integers and their units  */

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define NAME(f) PASTE(f, PATH)

typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
INLINE void decode_portable(const uint8_t *c, v4 *out) {
    out[0] = (v4){E2M1[c[0] & 15], E2M1[c[1] & 15], E2M1[c[2] & 15], E2M1[c[3] & 15]};
    out[1] = (v4){E2M1[c[0] >> 4], E2M1[c[1] >> 4], E2M1[c[2] >> 4], E2M1[c[3] >> 4]};
}
INLINE void block_scales_portable(const uint8_t *sf, float *out) {
    for (int i = 0; i < 16; i++) out[i] = from_e4m3(sf[i]);
}
INLINE v4 scales_portable(const float *sf, int64_t k) { return (v4){0} + sf[k / 16]; }
INLINE v4 mul_add_portable(v4 sum, v4 a, v4 b) { return sum + a * b; }
INLINE void sum4_portable(v4 a, v4 b, v4 c, v4 d, float *out) {
    out[0] = (a[0] + a[1]) + (a[2] + a[3]), out[1] = (b[0] + b[1]) + (b[2] + b[3]);
    out[2] = (c[0] + c[1]) + (c[2] + c[3]), out[3] = (d[0] + d[1]) + (d[2] + d[3]);
}
INLINE v4 spread_portable(const float *x) { return (v4){0} + *x; }
INLINE void transpose_portable(const uint8_t *rows, int64_t stride, uint8_t *out) {
    for (int i = 0; i < 4; i++) for (int r = 0; r < 4; r++) out[4 * i + r] = rows[r * stride + i];
}
#define PATH portable
#define PLANES 2
#define NUMBER 0
#define TARGET
#define V v4
#define M v4
#define Element float
#define NR 4
#define NT 4
#define NP 2
#define NX 4
#define FEW 4
#include "cpu_path.h"

#if defined(__x86_64__)

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
#define TARGET __attribute__((target("avx2,fma,f16c")))
INLINE TARGET void decode_avx2(const uint8_t *c, v8 *out) { /* a table of magnitudes, the sign from bit 3 */
    const __m256 table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i sign = _mm256_set1_epi32((int)0x80000000);
    __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)c));
    __m256 low = _mm256_permutevar8x32_ps(table, v), high = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(v, 4));
    out[0] = _mm256_xor_ps(low, _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(v, 28), sign)));
    out[1] = _mm256_xor_ps(high, _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(v, 24), sign)));
}
/* By way of fp16, whose exponent bias is 8 larger; 0x7f is NaN. */
INLINE TARGET void block_scales_avx2(const uint8_t *sf, float *out) {
    __m256i v = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)sf)), 7);
    v = _mm256_or_si256(v, _mm256_cmpeq_epi16(v, _mm256_set1_epi16(0x7f << 7)));
    const __m256 unit = _mm256_set1_ps(0x1p8f);
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(v)), unit));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)), unit));
}
INLINE TARGET v8 scales_avx2(const float *sf, int64_t k) { return _mm256_broadcast_ss(sf + k / 16); }
INLINE TARGET v8 mul_add_avx2(v8 sum, v8 a, v8 b) { return _mm256_fmadd_ps(a, b, sum); }
INLINE TARGET void sum4_avx2(v8 a, v8 b, v8 c, v8 d, float *out) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
INLINE TARGET v8 spread_avx2(const float *x) { return _mm256_broadcast_ss(x); }
INLINE TARGET void transpose_avx2(const uint8_t *rows, int64_t stride, uint8_t *out) {
#define PAIR(a, b) _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)(rows + a * stride)), \
                                     _mm_loadl_epi64((const __m128i *)(rows + b * stride)))
    __m128i a = PAIR(0, 1), b = PAIR(2, 3), c = PAIR(4, 5), d = PAIR(6, 7);
#undef PAIR
    __m128i ab = _mm_unpacklo_epi16(a, b), cd = _mm_unpacklo_epi16(c, d);
    __m128i AB = _mm_unpackhi_epi16(a, b), CD = _mm_unpackhi_epi16(c, d);
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi32(ab, cd));
    _mm_storeu_si128((__m128i *)(out + 16), _mm_unpackhi_epi32(ab, cd));
    _mm_storeu_si128((__m128i *)(out + 32), _mm_unpacklo_epi32(AB, CD));
    _mm_storeu_si128((__m128i *)(out + 48), _mm_unpackhi_epi32(AB, CD));
}
#define PATH avx2
#define PLANES 2
#define NUMBER 1
#define V v8
#define M v8
#define Element float
#define NR 4
#define NT 2
#define NP 2
#define NX 6
#define FEW 4
#include "cpu_path.h"

#ifdef __clang__
#define WIDE
#else
#define WIDE ",prefer-vector-width=512" /* for the loops that the compiler vectorizes */
#endif
typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c" WIDE)))
INLINE TARGET void decode_avx512(const uint8_t *c, v16 *out) { /* the table reads 4 bits of each index */
    const __m512 table = _mm512_loadu_ps(E2M1);
    __m512i v = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)c));
    out[0] = _mm512_permutexvar_ps(v, table);
    out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), table);
}
INLINE TARGET void block_scales_avx512(const uint8_t *sf, float *out) {
    __m256i v = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)sf)), 7);
    v = _mm256_or_si256(v, _mm256_cmpeq_epi16(v, _mm256_set1_epi16(0x7f << 7)));
    _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_cvtph_ps(v), _mm512_set1_ps(0x1p8f)));
}
#define block_scales_avx512bf16 block_scales_avx512
INLINE TARGET v16 scales_avx512(const float *sf, int64_t k) { /* 2 blocks: 8 lanes each */
    const __m512i pick = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m128 two = _mm_castpd_ps(_mm_load_sd((const double *)(sf + k / 16)));
    return _mm512_permutexvar_ps(pick, _mm512_castps128_ps512(two));
}
INLINE TARGET v16 mul_add_avx512(v16 sum, v16 a, v16 b) { return _mm512_fmadd_ps(a, b, sum); }
INLINE TARGET void sum4_avx512(v16 a, v16 b, v16 c, v16 d, float *out) {
    v16 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    v16 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    v16 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
typedef float number_at __attribute__((may_alias));
INLINE TARGET v16 spread_avx512(const float *x) { return _mm512_set1_ps(*x); }
INLINE TARGET __m512i fourth_rows(const uint8_t *row, int64_t stride) { /* 16 bytes of rows 0, 4, 8 and 12 from here */
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)row));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(row + 4 * stride)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(row + 8 * stride)), 2);
    return _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(row + 12 * stride)), 3);
}
/* Four rows are interleaved within each lane of 128 bits, then the lanes are. */
INLINE TARGET void transpose_avx512(const uint8_t *rows, int64_t stride, uint8_t *out) {
    __m512i a = fourth_rows(rows, stride), b = fourth_rows(rows + stride, stride);
    __m512i c = fourth_rows(rows + 2 * stride, stride), d = fourth_rows(rows + 3 * stride, stride);
    __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    __m512i AB = _mm512_unpackhi_epi8(a, b), CD = _mm512_unpackhi_epi8(c, d);
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(lanes, _mm512_unpacklo_epi16(ab, cd)));
    _mm512_storeu_si512(out + 64, _mm512_permutexvar_epi32(lanes, _mm512_unpackhi_epi16(ab, cd)));
    _mm512_storeu_si512(out + 128, _mm512_permutexvar_epi32(lanes, _mm512_unpacklo_epi16(AB, CD)));
    _mm512_storeu_si512(out + 192, _mm512_permutexvar_epi32(lanes, _mm512_unpackhi_epi16(AB, CD)));
}
#define PATH avx512
#define PLANES 2
#define NUMBER 2
#define V v16
#define M v16
#define Element float
#define NR 4
#define NT 6
#define NP 4
#define NX 6
#define FEW 6
#include "cpu_path.h"

#ifdef HAS_BF16
typedef uint16_t h32 __attribute__((vector_size(64), aligned(2), may_alias));
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c" WIDE)))
/* A 16-bit word is four codes, one for each plane. Each 32-bit lane of a plane is two elements of one block, so a step
   is 8 blocks of 2 lanes. The table is there twice, because a look-up reads 5 bits of each word. */
INLINE TARGET void decode_avx512bf16(const uint8_t *c, h32 *out) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00, (short)0xbf80,
        (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0));
    const __m512i v = _mm512_loadu_si512(c);
    UNROLL for (int i = 0; i < 4; i++) out[i] = (h32)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4 * i), table);
}
INLINE TARGET v16 scales_avx512bf16(const float *sf, int64_t k) {
    const __m512i pick = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(pick, _mm512_castps256_ps512(_mm256_loadu_ps(sf + k / 16)));
}
INLINE TARGET v16 mul_add_avx512bf16(v16 sum, h32 a, h32 b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
INLINE TARGET h32 spread_avx512bf16(const uint16_t *x) { return (h32)_mm512_set1_ps(*(const number_at *)x); }
/* Weights are dequantized by integer operations, which leaves the multipliers to the products: in bf16 an element times
   its block scale is the scale's bits, plus a step of the mantissa if the element is 1.5 times a power of two, plus the
   element's exponent. 16 rows of n codes -> a vector for every 8 codes of all rows and, for each block, the scales and
   the masks that keep only that step in a look-up's low bits. bytes: the block scales, row by row; in fp16 they are 2^8
   too small. */
typedef struct { __m512i eights[K_BLOCK / 8], scales[K_BLOCK / 16][2]; } Staged;
INLINE TARGET void stage_avx512bf16(const uint8_t *codes, int64_t stride, const uint8_t *bytes, int64_t n,
                                    Staged *out) {
    __m512i *eights = out->eights, (*scales)[2] = out->scales;
    for (int64_t k = 0; k < n; k += 32, codes += 16, eights += 4) {
        __m512i a = fourth_rows(codes, stride), b = fourth_rows(codes + stride, stride);
        __m512i c = fourth_rows(codes + 2 * stride, stride), d = fourth_rows(codes + 3 * stride, stride);
        __m512i ab = _mm512_unpacklo_epi16(a, b), cd = _mm512_unpacklo_epi16(c, d);
        __m512i AB = _mm512_unpackhi_epi16(a, b), CD = _mm512_unpackhi_epi16(c, d);
        eights[0] = _mm512_unpacklo_epi32(ab, cd), eights[1] = _mm512_unpackhi_epi32(ab, cd);
        eights[2] = _mm512_unpacklo_epi32(AB, CD), eights[3] = _mm512_unpackhi_epi32(AB, CD);
    }
    /* mantissa 1 + m / 8, looked up by m -> what a factor of 1.5 adds to the bits of bf16 */
    const __m512i step = _mm512_or_si512(_mm512_set1_epi16((short)0xff80), _mm512_broadcast_i32x4(
        _mm_setr_epi16(64, 72, 80, 84, 80, 76, 72, 68)));
    const __m512i one = _mm512_set1_epi32(1), last = _mm512_set1_epi32(0x7fc07fbf);
    for (int64_t k = 0; k < n; k += 32, bytes += 32) {
        __m512i e4m3 = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)bytes));
        __m512i f16 = _mm512_mask_mov_epi16(_mm512_slli_epi16(e4m3, 7), _mm512_cmpeq_epi16_mask(e4m3, _mm512_set1_epi16(0x7f)),
                                            _mm512_set1_epi16(0x7e00));
        const __m512i upper[2] = {(__m512i)_mm512_cvtph_ps(_mm512_castsi512_si256(f16)),
                                  (__m512i)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(f16, 1))};
        UNROLL for (int i = 0; i < 2; i++, scales++) {
            __m512i v = _mm512_or_si512(upper[i], _mm512_srli_epi32(upper[i], 16));
            scales[0][0] = v;
            __mmask16 number = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(v, one), last); /* not 0 or NaN, which must stay */
            scales[0][1] = _mm512_maskz_mov_epi32(number, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), step));
        }
    }
}
/* 8 codes of all rows -> the pairs of bf16 of each plane: elements 0 and 4, 1 and 5, 2 and 6, 3 and 7. */
INLINE TARGET void pairs_avx512bf16(const Staged *from, int64_t i, h32 *v) {
    const __m512i eight = from->eights[i], *scale = from->scales[i / 2];
    /* 128 times the exponent (with the missing 2^8), and all low bits set if the mantissa is 1.5; for code 0 a number so
       negative that adding any scale leaves it negative */
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi16((short)0x8080, 0x380, 0x400, 0x47f, 0x480, 0x4ff, 0x500, 0x57f));
    const __m512i bytes = _mm512_set4_epi32(0x800e8006, 0x800c8004, 0x800a8002, 0x80088000); /* as words */
    UNROLL for (int u = 0; u < 2; u++) {
        __m512i codes = _mm512_shuffle_epi8(eight, _mm512_add_epi32(bytes, _mm512_set1_epi32(u * 0x10001)));
        UNROLL for (int odd = 0; odd < 2; odd++) {
            __m512i found = _mm512_permutexvar_epi16(odd ? _mm512_srli_epi16(codes, 4) : codes, table);
            __m512i sum = _mm512_add_epi16(_mm512_and_si512(found, scale[1]), scale[0]);
            v[2 * u + odd] = (h32)_mm512_ternarylogic_epi32(_mm512_max_epi16(sum, _mm512_setzero_si512()), /* a | b & c */
                _mm512_slli_epi16(codes, odd ? 8 : 12), _mm512_set1_epi16((short)0x8000), 0xf8);
        }
    }
}
/* The 32 bits of nt rows side by side: out[n][nt] */
INLINE TARGET void weave_avx512bf16(const uint16_t *const *x, int64_t nt, int64_t n, uint16_t *out) {
    for (int64_t t = 0; t < nt; t += 4) {
        int64_t a = MIN(t, nt - 4);
        for (int64_t i = 0; i < n; i += 4) {
            __m128 r[4];
            UNROLL for (int j = 0; j < 4; j++) r[j] = _mm_loadu_ps((const float *)(const void *)(x[a + j] + 2 * i));
            _MM_TRANSPOSE4_PS(r[0], r[1], r[2], r[3]);
            UNROLL for (int j = 0; j < 4; j++) _mm_storeu_ps((float *)(void *)(out + 2 * ((i + j) * nt + a)), r[j]);
        }
    }
}
#define transpose_avx512bf16 transpose_avx512
#define sum4_avx512bf16 sum4_avx512
#define PATH avx512bf16
#define PLANES 4
#define NUMBER 3
#define LEADS
#define V v16
#define M h32
#define Element uint16_t
#define NR 4
#define NT 6
#define NP 4
#define NX 6
#define FEW 10
#include "cpu_path.h"
#endif

#ifdef HAS_AMX
#define TARGET __attribute__((target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx512vbmi,avx2,fma,f16c" WIDE)))
/* Few tokens are multiplied as integers here: these processors take two cycles for a product of bf16. A code is
   looked up as 2 * e2m1 + 12, an unsigned byte. Each block of 16 elements of x becomes integers q times a power of two,
   with |q| < 2^15, which are 256 * high + low, two signed bytes. A lane of the sums is 8 elements of one block:
   the sum of (2 * e2m1 + 12) * q, which begins at -12 times the sum of q. */
typedef struct {
    int8_t high[2][64], low[2][64]; /* of the elements with even and with odd k */
    int32_t first[16];
    float unit[16];                 /* of x, times that of the codes, 1/2 */
} Integers;                         /* of a step */
INLINE TARGET void decode_integers_amx(const uint8_t *c, __m512i *even, __m512i *odd) { /* a look-up reads 6 bits */
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i v = _mm512_loadu_si512(c);
    *even = _mm512_permutexvar_epi8(v, table), *odd = _mm512_permutexvar_epi8(_mm512_srli_epi16(v, 4), table);
}
INLINE TARGET v16 dot_integers_amx(__m512i even, __m512i odd, const uint16_t *at, v16 scale, v16 sum) {
    const Integers *x = (const Integers *)(const void *)at;
    __m512i high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, _mm512_load_si512(x->high[0]));
    __m512i low = _mm512_dpbusd_epi32(_mm512_load_si512(x->first), even, _mm512_load_si512(x->low[0]));
    high = _mm512_dpbusd_epi32(high, odd, _mm512_load_si512(x->high[1]));
    low = _mm512_dpbusd_epi32(low, odd, _mm512_load_si512(x->low[1]));
    v16 part = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    return _mm512_fmadd_ps(part * *(const v16 *)x->unit, scale, sum);
}
/* K elements of a row of x, whole steps. NaN and infinity make their block's unit NaN. */
INLINE TARGET void integers_amx(const float *v, int64_t K, int8_t *out) {
    const __m128i halves = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    for (int64_t k = 0; k < K; k += 16) {
        Integers *to = (Integers *)(void *)out + k / 128;
        int64_t lane = k % 128 / 8;
        __m512 x = _mm512_loadu_ps(v + k);
        /* 255 / 256 * 2^15 would be more than 127 * 256 + 127: these mantissas get the next exponent */
        int32_t largest = _mm512_reduce_max_epi32(_mm512_castps_si512(_mm512_abs_ps(x))), finite = largest < 0x7f800000;
        int32_t shift = finite ? 141 - ((largest + 0x10000) >> 23) : 0; /* |x| < 2^(15 - shift) */
        __m512i q = _mm512_cvtps_epi32(_mm512_scalef_ps(x, _mm512_set1_ps((float)shift)));
        if (!finite) q = _mm512_setzero_si512();
        __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
        __m512i low = _mm512_sub_epi32(q, _mm512_slli_epi32(high, 8));
        __m128i h = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), halves), l = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(low), halves);
        _mm_storel_epi64((__m128i *)(void *)(to->high[0] + 4 * lane), h), _mm_storeh_pd((double *)(void *)(to->high[1] + 4 * lane), (__m128d)h);
        _mm_storel_epi64((__m128i *)(void *)(to->low[0] + 4 * lane), l), _mm_storeh_pd((double *)(void *)(to->low[1] + 4 * lane), (__m128d)l);
        for (int64_t i = 0; i < 2; i++) {
            to->first[lane + i] = -12 * _mm512_mask_reduce_add_epi32((__mmask16)(0xff << 8 * i), q);
            to->unit[lane + i] = finite ? __builtin_ldexpf(0.5f, -shift) : __builtin_nanf("");
        }
    }
}
/* The n block scales of a weight row as bf16, then zeros up to a multiple of 64. The bits of bf16 are those of e4m3
   shifted by 4, plus 0x3c00, but for subnormal numbers and for NaN: two look-ups, of the low and of the high bytes. */
INLINE TARGET void row_scales_amx(const uint8_t *sf, const uint8_t *end, int64_t n, uint16_t *out) {
    (void)end;
    const __m128i usual = _mm_setr_epi8(0, 16, 32, 48, 64, 80, 96, 112, -128, -112, -96, -80, -64, -48, -32, -16);
    const __m128i first = _mm_setr_epi8(0, 0, -128, -64, 0, 32, 64, 96, -128, -112, -96, -80, -64, -48, -32, -16);
    const __m512i low = _mm512_inserti32x4(_mm512_broadcast_i32x4(usual), first, 0);
    const __m512i low64 = _mm512_mask_mov_epi8(_mm512_broadcast_i32x4(usual), 1ull << 63, _mm512_set1_epi8((char)0xc0));
    const __m512i high = _mm512_setr_epi32(
        0x3b3b3b00, 0x3c3c3c3c, 0x3c3c3c3c, 0x3c3c3c3c, 0x3d3d3d3d, 0x3d3d3d3d, 0x3d3d3d3d, 0x3d3d3d3d,
        0x3e3e3e3e, 0x3e3e3e3e, 0x3e3e3e3e, 0x3e3e3e3e, 0x3f3f3f3f, 0x3f3f3f3f, 0x3f3f3f3f, 0x3f3f3f3f);
    const __m512i high64 = _mm512_setr_epi32(
        0x40404040, 0x40404040, 0x40404040, 0x40404040, 0x41414141, 0x41414141, 0x41414141, 0x41414141,
        0x42424242, 0x42424242, 0x42424242, 0x42424242, 0x43434343, 0x43434343, 0x43434343, 0x7f434343);
    const __m512i apart = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); /* unpack takes half of every 16 bytes */
    for (int64_t i = 0; i < n; i += 64) {
        __builtin_prefetch(sf + 8 * n + i); /* of the rows after the next ones: NR is 4 */
        __m512i b = _mm512_maskz_loadu_epi8(n - i < 64 ? (1ull << (n - i)) - 1 : ~0ull, sf + i);
        b = _mm512_permutexvar_epi64(apart, b);
        __m512i l = _mm512_permutex2var_epi8(low, b, low64), h = _mm512_permutex2var_epi8(high, b, high64);
        _mm512_storeu_si512(out + i, _mm512_unpacklo_epi8(l, h));
        _mm512_storeu_si512(out + i + 32, _mm512_unpackhi_epi8(l, h));
    }
}
INLINE TARGET v16 scales_amx(const uint16_t *sf, int64_t k) { /* the upper half of every lane */
    const __m512i pick = _mm512_setr_epi32(0, 0, 1 << 16, 1 << 16, 2 << 16, 2 << 16, 3 << 16, 3 << 16,
                                           4 << 16, 4 << 16, 5 << 16, 5 << 16, 6 << 16, 6 << 16, 7 << 16, 7 << 16);
    const __m512i eight = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)(sf + k / 16)));
    return (v16)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, pick, eight);
}
#define mul_add_amx mul_add_avx512bf16
#define spread_amx spread_avx512bf16
#define transpose_amx transpose_avx512
#define sum4_amx sum4_avx512
#define stage_amx stage_avx512bf16
#define pairs_amx pairs_avx512bf16
#define PATH amx
#define PLANES 4
#define NUMBER 5
#define TILES
#define INTEGERS 3
#define V v16
#define M h32
#define Element uint16_t
#define NR 4
#define NT 6
#define NP 4
#define NX 6
#define FEW 8
#include "cpu_path.h"
#endif
#endif

#if defined(__aarch64__)
INLINE void decode_neon(const uint8_t *c, v4 *out) { /* looks up the two upper bytes of each float */
    static const uint8_t BYTES[32] = {0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0,
                                      0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    const uint8x16x2_t table = {{vld1q_u8(BYTES), vld1q_u8(BYTES + 16)}};
    const uint32x4_t none = vdupq_n_u32(0x0010ffff); /* beyond the table: 0 */
    uint32_t four;
    memcpy(&four, c, 4);
    uint32x4_t v = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
    uint32x4_t low = vmlaq_n_u32(none, vandq_u32(v, vdupq_n_u32(15)), 0x01010000);
    uint32x4_t high = vmlaq_n_u32(none, vshrq_n_u32(v, 4), 0x01010000);
    out[0] = (v4)vqtbl2q_u8(table, vreinterpretq_u8_u32(low)), out[1] = (v4)vqtbl2q_u8(table, vreinterpretq_u8_u32(high));
}
INLINE void block_scales_neon(const uint8_t *sf, float *out) { /* as in avx2 */
    for (int i = 0; i < 16; i += 8) {
        uint16x8_t v = vshll_n_u8(vld1_u8(sf + i), 7);
        float16x8_t h = vreinterpretq_f16_u16(vorrq_u16(v, vceqq_u16(v, vdupq_n_u16(0x7f << 7))));
        vst1q_f32(out + i, vmulq_n_f32(vcvt_f32_f16(vget_low_f16(h)), 0x1p8f));
        vst1q_f32(out + i + 4, vmulq_n_f32(vcvt_high_f32_f16(h), 0x1p8f));
    }
}
INLINE v4 mul_add_neon(v4 sum, v4 a, v4 b) { return (v4)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b); }
INLINE void transpose_neon(const uint8_t *rows, int64_t stride, uint8_t *out) {
    static const uint8_t ORDER[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    uint32_t v[4];
    for (int r = 0; r < 4; r++) memcpy(&v[r], rows + r * stride, 4);
    vst1q_u8(out, vqtbl1q_u8(vreinterpretq_u8_u32(vld1q_u32(v)), vld1q_u8(ORDER)));
}
#define scales_neon scales_portable
#define spread_neon spread_portable
#define sum4_neon sum4_portable
#define PATH neon
#define PLANES 2
#define NUMBER 4
#define TARGET
#define V v4
#define M v4
#define Element float
#define NR 4
#define NT 4
#define NP 4
#define NX 6
#define FEW 4
#include "cpu_path.h"
#endif

static const Path *const PATHS[6] = {
    &path_portable,
#if defined(__x86_64__)
    &path_avx2, &path_avx512,
#ifdef HAS_BF16
    &path_avx512bf16,
#endif
#ifdef HAS_AMX
    [5] = &path_amx,
#endif
#elif defined(__aarch64__)
    [4] = &path_neon,
#endif
};

#ifdef SOURCES /* the library of a wheel */
const char sources[] = SOURCES; /* backend.py compares this checksum with the sources beside it */
/* glibc 2.34 gave these functions new versions. With the old ones the wheel runs on glibc 2.28 or newer, as torch's. */
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5\n.symver pthread_detach, pthread_detach@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.17\n.symver pthread_detach, pthread_detach@GLIBC_2.17");
#endif
#endif

static int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* One block of memory is kept between calls, so that the system need not provide its pages again. For a long prompt it
   must be provided, soonest in huge pages. */
enum { PAGE = 2 << 20 };
typedef struct { int64_t size; char pad[56]; } Memory;
static _Atomic(Memory *) kept;

static Memory *take(int64_t size) {
    Memory *m = atomic_exchange(&kept, NULL);
    if (m && m->size >= size) return m;
    free(m);
    int64_t unit = size < 2 * PAGE ? 64 : PAGE, bytes = whole(size + (int64_t)sizeof(Memory), unit);
    m = aligned_alloc((size_t)unit, (size_t)bytes);
#ifdef MADV_HUGEPAGE
    if (m && unit == PAGE) madvise(m, (size_t)bytes, MADV_HUGEPAGE);
#endif
    if (m) m->size = size;
    return m;
}

static void give_back(Memory *m) { free(m->size > 128 << 20 ? m : atomic_exchange(&kept, m)); }

/* Sort the assignments by expert, stably. Returns 0, or -2 if an id is illegal. */
static int64_t group(const Group *g) {
    int32_t *start = g->offsets;
    memset(start, 0, 4 * (g->E + 1));
    for (int64_t i = 0; i < g->R; i++) {
        if (g->ids[i] < -1 || g->ids[i] > g->E) return -2;
        if (g->ids[i] >= 0 && g->ids[i] < g->E) start[g->ids[i] + 1]++;
    }
    for (int64_t e = 0; e < g->E; e++) start[e + 1] += start[e];
    int32_t unrouted = start[g->E];
    for (int64_t i = 0; i < g->R; i++) {
        int64_t e = g->ids[i];
        int32_t r = e >= 0 && e < g->E ? start[e]++ : unrouted++;
        g->order[r] = (int32_t)i, g->token[r] = (int32_t)(i / g->top_k);
    }
    memmove(start + 1, start, 4 * g->E); /* every start has moved to the next one */
    start[0] = 0;
    return 0;
}

/* Whether offsets [E + 1] ascend from 0 to at most R, and `rows` [R] (or NULL) are below `end`. If so, nothing is read
   or written outside the tensors. */
static int fits(const int32_t *offsets, int64_t E, int64_t R, const int32_t *rows, int64_t end) {
    int bad = offsets[0] != 0 || offsets[E] > R;
    for (int64_t e = 0; e < E; e++) bad |= offsets[e] > offsets[e + 1];
    for (int64_t r = 0; rows && r < R; r++) bad |= rows[r] < 0 || rows[r] >= end;
    return !bad;
}

static int64_t rows_bytes(const Gemm *g, const Path *p) { return whole(g->x_rows * g->stride * p->element, 64); }
static int64_t integers_bytes(const Gemm *g, const Path *p) {
    int64_t rows = g->index ? g->x_rows : MIN(g->x_rows, g->E * p->few);
    return p->integers ? rows * g->integer_stride : 0;
}
static int64_t leads_bytes(const Gemm *g, const Path *p) {
    return p->weave ? whole(g->R * g->K_steps * p->element, 64) + 1024 : 0; /* a tile may begin with the last row */
}

static void make_tiles(Gemm *g) {
    g->tile = TILE / (g->paired ? 2 : 1);
    g->tiles = (g->width + g->tile - 1) / g->tile;
}

/* Computes sizes; returns the bytes for rows, integers, leads, shares, padded, hit, few_at and there. */
static int64_t measure(Gemm *g, const Path *p) {
    g->K_steps = whole(g->K, p->step);
    g->stride = g->K_steps + 64 / p->element; /* not a power of two, or rows would compete for the same cache sets */
    g->integer_stride = p->integers * g->K_steps + 64;
    make_tiles(g);
    int64_t few = 4 * 4 * (g->K_steps / 16 + 32), many = TILE * K_BLOCK * p->element + CHUNK * TILE * 4;
    g->work_bytes = whole(4 * g->K_steps + few + many, 64);
    return rows_bytes(g, p) + integers_bytes(g, p) + leads_bytes(g, p) + MAX_THREADS * (int64_t)sizeof(Share) + whole(g->E * 20, 64);
}

/* The same for Quantize: a token that several rows are copies of is quantized once, unless experts have scales. */
static int64_t measure_quantize(Quantize *q) {
    q->work_bytes = whole(q->K / 16, 64);
    return q->index && !q->scale && q->x_rows < q->R ? q->x_rows * token_bytes(q) : 0;
}

/* Adds the phases of a GEMM. Unrouted rows become zeros. guessed: its weights may be in the caches of the pool's cores,
   as `guess` leaves them. */
static void add_gemm(Job *job, Gemm *g, const Path *p, char *memory, int64_t threads, int guessed, _Atomic int64_t *lost) {
    int64_t E = g->E, hits = 0, row_bytes = g->width * (g->out_type == FP32 ? 4 : 2);
    for (int64_t r = g->offsets[E]; r < g->R; r++)
        memset((char *)g->out + (g->target ? g->target[r] : r) * row_bytes, 0, row_bytes);
    g->rows = memory;
    g->integers = memory + rows_bytes(g, p);
    g->leads = g->integers + integers_bytes(g, p);
    Share *own = (Share *)(void *)((char *)g->leads + leads_bytes(g, p));
    g->padded = (int64_t *)(void *)(own + MAX_THREADS);
    g->hit = (int32_t *)(g->padded + E);
    g->few_at = g->hit + E;
    g->there = (uint8_t *)(g->few_at + E);
    padded_starts(g->offsets, E, g->padded);
    g->few = p->few, g->lost = lost;
    g->few_rows = g->many_rows = 0;
    for (int64_t e = 0; e < E; e++) {
        int64_t tokens = g->offsets[e + 1] - g->offsets[e];
        if (tokens) g->hit[hits++] = (int32_t)e;
        g->few_at[e] = (int32_t)g->few_rows;
        *(tokens > g->few ? &g->many_rows : &g->few_rows) += tokens;
    }
    if (g->parts) add_phase(job, ask_for, g, hits * g->parts * 2, hits * g->N * g->K, threads);
    add_phase(job, p->arrange, g, g->x_rows, g->x_rows * g->K, threads);
    if (p->weave && g->many_rows)
        add_phase(job, p->weave, g, hits * whole(g->K_steps, K_BLOCK) / K_BLOCK, g->many_rows * g->K, threads);
    Phase *items = add_phase(job, p->item, g, hits * g->tiles, hits * g->N * g->K, threads);
    g->by_tile = 0;
    if (!g->parts && items->shares > 1) {
        items->fetch = fetch_tile; /* weights in files must be waited for first */
        if (guessed && g->offsets[E] == hits) g->by_tile = hits, give_shares(items, own);
    }
}

/* Runs the stages of a program: for each stage its kind, the number of 8-byte words in its struct, and the struct. The
   threads go through all stages together. Returns 0; -1 if out of memory; -2 if a Group finds an illegal id; -3 if
   offsets or indices do not fit; -4 if mapped weights are not in their file any more, -5 if their table was edited. */
int64_t run(const int64_t *program, int64_t count, int64_t path, int64_t threads, Parallel *parallel) {
    struct { int64_t kind, bytes; union { Group group; Quantize quantize; Gemm gemm; Combine combine; LowRank low; }; }
        stages[MAX_STAGES], *end = stages + count, *s;
    const Path *p = PATHS[path];
    _Atomic int64_t lost = 0;
    Job job;
    job.count = 0, job.threads = 1;
    atomic_init(&job.joined, 0);
    int64_t bytes = 0, work = 0;
    threads = MIN(threads, MAX_THREADS);
    for (s = stages; s < end; program += 2 + program[1], s++) {
        s->kind = program[0], s->bytes = 0;
        memcpy(&s->group, program + 2, 8 * program[1]);
        int64_t scratch = 0;
        if (s->kind == GEMM) s->bytes = measure(&s->gemm, p), scratch = s->gemm.work_bytes;
        if (s->kind == QUANTIZE) s->bytes = measure_quantize(&s->quantize), scratch = s->quantize.work_bytes;
        bytes += s->bytes, work = scratch > work ? scratch : work;
    }
    Memory *memory = take(bytes + threads * work);
    if (!memory) return -1;
    int64_t failed = 0;
    char *at = (char *)(memory + 1) + threads * work;
    for (s = stages; s < end && !failed; at += s->bytes, s++)
        if (s->kind == GROUP) failed = group(&s->group);
        else if (s->kind == QUANTIZE) {
            Quantize *q = &s->quantize;
            if (!fits(q->offsets, q->E, q->R, q->index, q->x_rows)) { failed = -3; break; }
            q->work = (uint8_t *)(memory + 1), q->work_bytes = work, q->tokens = s->bytes ? (uint8_t *)at : NULL;
            if (q->tokens) add_phase(&job, p->quantize_token, q, q->x_rows, q->x_rows * q->K, threads);
            add_phase(&job, p->quantize, q, q->R, q->R * q->K, threads);
        } else if (s->kind == COMBINE) {
            const Combine *c = &s->combine;
            add_phase(&job, p->combine, c, c->T * parts_of(c->H), c->T * c->top_k * c->H, threads);
        } else if (s->kind == LOW_RANK) {
            const LowRank *l = &s->low;
            if (!fits(l->offsets, l->G, l->R, l->index, l->x_rows * l->slots) || !fits(l->offsets, l->G, l->R, l->target, l->R)) {
                failed = -3;
                break;
            }
            add_phase(&job, p->shrink_rows, l, l->R, l->R * l->rank * l->K, threads);
            add_phase(&job, p->expand_rows, l, l->R * parts_of(l->N), l->R * l->rank * l->N, threads);
        } else {
            const Gemm *g = &s->gemm;
            if (!fits(g->offsets, g->E, g->R, g->index, g->x_rows) || !fits(g->offsets, g->E, g->R, g->target, g->R)) {
                failed = -3;
                break;
            }
            s->gemm.work = (char *)(memory + 1), s->gemm.work_bytes = work;
            add_gemm(&job, &s->gemm, p, at, threads, !parallel, &lost);
        }
    if (!failed) run_job(&job, threads, parallel);
    give_back(memory);
    return lost ? -3 - lost : failed;
}

#include "cpu_calls.h"
