/* The loops of the CPU backend for one instruction set: cpu.c includes this file once for each. With -DONLY=i, which
   backend.py passes when it compiles on first use, only the path with that NUMBER is compiled. */

static const Path NAME(path); /* zeros where it is not compiled */
#if !defined(ONLY) || ONLY == NUMBER

#define LANES ((int64_t)(sizeof(V) / 4))
#define WIDTH ((int64_t)(sizeof(M) / sizeof(Element)))
#define STEP (PLANES * WIDTH)
#if defined(LEADS) || defined(TILES)
#define WOVEN /* weave puts tokens side by side */
#endif
#ifdef INTEGERS
#define Scale uint16_t
#define SCALES 64
#else
#define Scale float
#define SCALES 16
#define INTEGERS 0
#endif

INLINE TARGET M NAME(at)(const Element *p) { return *(const M *)p; } /* not memcpy, which GCC takes apart */

/* sums[r][t] += codes[r][k .. k + STEP) . x[t], scaled block by block. ahead: codes to prefetch */
INLINE TARGET void NAME(step)(int nr, int nt, const uint8_t *const *codes, const Scale *const *sf, int64_t k,
                              const Element *const *x, V sums[NR][NT], const uint8_t *ahead) {
    UNROLL for (int r = 0; r < nr; r++) {
        __builtin_prefetch(ahead + r * (STEP / 2));
        V scale = NAME(scales)(sf[r], k);
#if INTEGERS
        __m512i even, odd;
        NAME(decode_integers)(codes[r], &even, &odd);
        UNROLL for (int t = 0; t < nt; t++) sums[r][t] = NAME(dot_integers)(even, odd, x[t] + k * INTEGERS / 2, scale, sums[r][t]);
#else
        M plane[PLANES];
        NAME(decode)(codes[r], plane);
        UNROLL for (int t = 0; t < nt; t++) {
            V part = (V){0};
            UNROLL for (int p = 0; p < PLANES; p++) part = NAME(mul_add)(part, plane[p], NAME(at)(x[t] + k + p * WIDTH));
            sums[r][t] += part * scale;
        }
#endif
    }
}

/* NR weight rows, decoded on the way, by nt tokens: out[t * TILE + r] */
INLINE TARGET void NAME(dot_codes)(int nt, const uint8_t *const *codes, const Scale *const *sf, int64_t K,
                                   const Element *const *x, float *out) {
    V sums[NR][NT];
    UNROLL for (int r = 0; r < NR; r++) UNROLL for (int t = 0; t < nt; t++) sums[r][t] = (V){0};
    /* Prefetch the rows that follow in memory: whole groups of rows ahead, at least 2 KB from here. */
    int64_t k = 0, group = NR * K / 2;
    const uint8_t *ahead = codes[0] + group + (2048 - 1) / group * group;
    for (; k + STEP <= K; k += STEP) {
        const uint8_t *now[NR];
        UNROLL for (int r = 0; r < NR; r++) now[r] = codes[r] + k / 2;
        NAME(step)(NR, nt, now, sf, k, x, sums, ahead + NR * k / 2);
    }
    if (k < K) { /* the last codes, with zeros up to a whole step */
        uint8_t tail[NR][STEP / 2];
        const uint8_t *now[NR];
        memset(tail, 0, sizeof tail);
        UNROLL for (int r = 0; r < NR; r++) memcpy(tail[r], codes[r] + k / 2, (K - k) / 2), now[r] = tail[r];
        NAME(step)(NR, nt, now, sf, k, x, sums, tail[0]);
    }
    UNROLL for (int t = 0; t < nt; t++)
        NAME(sum4)(sums[0][t], sums[1][t], sums[2][t], sums[3][t], out + t * TILE);
}

/* NP vectors of dequantized rows by nt tokens: sums[t * TILE] += over `steps` times 32 bits of K */
INLINE TARGET void NAME(multiply)(int nt, const Element *w, const Element *const *x, int64_t steps, int first, float *sums) {
    const int64_t unit = 4 / sizeof(Element);
    V s[NX][NP];
    UNROLL for (int t = 0; t < nt; t++)
        UNROLL for (int p = 0; p < NP; p++) s[t][p] = first ? (V){0} : *(V *)(sums + t * TILE + p * LANES);
    for (int64_t i = 0; i < steps; i++) {
        M v[NP];
        UNROLL for (int p = 0; p < NP; p++) v[p] = NAME(at)(w + (i * NP + p) * WIDTH);
        UNROLL for (int t = 0; t < nt; t++) {
            M a = NAME(spread)(x[t] + i * unit);
            UNROLL for (int p = 0; p < NP; p++) s[t][p] = NAME(mul_add)(s[t][p], v[p], a);
        }
    }
    UNROLL for (int t = 0; t < nt; t++)
        UNROLL for (int p = 0; p < NP; p++) *(V *)(sums + t * TILE + p * LANES) = s[t][p];
}

static TARGET void NAME(few_tokens)(int nt, const uint8_t *const *codes, const Scale *const *sf, int64_t K,
                                    const Element *const *x, float *out) {
#define CASE(n) case n: if (n <= NT) NAME(dot_codes)(MIN(n, NT), codes, sf, K, x, out); break;
    switch (nt) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}
static TARGET void NAME(many_tokens)(int nt, const Element *w, const Element *const *x, int64_t steps, int first, float *sums) {
#define CASE(n) case n: if (n <= NX) NAME(multiply)(MIN(n, NX), w, x, steps, first, sums); break;
    switch (nt) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

#if !INTEGERS
/* The n block scales of a weight row as fp32, then zeros up to a multiple of 16. */
INLINE TARGET void NAME(row_scales)(const uint8_t *sf, const uint8_t *end, int64_t n, float *out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __builtin_prefetch(sf + 2 * NR * n + i);
        NAME(block_scales)(sf + i, out + i);
    }
    if (i == n) return;
    if (n > 16) NAME(block_scales)(sf + n - 16, out + n - 16); /* some of them for the second time */
    else if (end - sf >= 16) NAME(block_scales)(sf, out); /* with some of the next rows */
    else {
        uint8_t tail[16] = {0};
        memcpy(tail, sf, n);
        NAME(block_scales)(tail, out);
    }
    memset(out + n, 0, 64);
}
#endif

/* The codes and block scales of LANES weight rows, n elements from k on. The codes are in place or, if the rows do not
   lie evenly in memory or end early, copied into `spare`. */
typedef struct {
    const uint8_t *codes;
    int64_t stride;
    uint8_t spare[LANES * K_BLOCK / 2], sf[16 * LANES]; /* sf: block by block */
} NAME(Rows);

INLINE TARGET void NAME(find)(const Gemm *g, const Row *row, int64_t k, int64_t n, NAME(Rows) *to) {
    int64_t K16 = g->K / 16, have = MIN(n, g->K - k), sf_stride = K16;
    const uint8_t *sf = row[0].sf + k / 16;
    const Row *last = row + LANES - 1;
    uint8_t spare[LANES * 16];
    to->codes = row[0].codes + k / 2, to->stride = g->K / 2;
    for (int64_t r = 0; r < LANES; r++)
        for (int64_t i = K_BLOCK / 2; i < K_BLOCK; i += 64) __builtin_prefetch(to->codes + r * to->stride + i);
    /* not so if the last row of a tile is repeated, or the rows are in two parts of a matrix */
    int follow = last->sf - row->sf == (LANES - 1) * K16 && last->codes - row->codes == (LANES - 1) * g->K / 2;
    if (!follow || have < n) {
        memset(to->spare, 0, sizeof to->spare);
        for (int64_t r = 0; r < LANES; r++)
            memcpy(to->spare + r * K_BLOCK / 2, row[r].codes + k / 2, have / 2);
        to->codes = to->spare, to->stride = K_BLOCK / 2;
    }
    if (!follow || have < n || last->end - last->sf < k / 16 + 16) { /* reading 16 would pass the end */
        memset(spare, 0, sizeof spare);
        for (int64_t r = 0; r < LANES; r++) memcpy(spare + r * 16, row[r].sf + k / 16, have / 16);
        sf = spare, sf_stride = 16;
    }
    for (int64_t i = 0; i < 16; i += LANES) NAME(transpose)(sf + i, sf_stride, to->sf + i * LANES);
}

#if defined(TILES)

/* The rows of an expert with many tokens as AMX reads them: each chunk, at expert's first row + begin, is
   [K_steps / 32][tokens][32], so that 16 tokens by 32 elements are 1 KB of contiguous memory. */
static TARGET void NAME(weave_item)(const void *problem, int64_t i, int64_t next, int thread) {
    (void)next, (void)thread;
    const Gemm *g = problem;
    int64_t blocks = (g->K_steps + K_BLOCK - 1) / K_BLOCK, e = g->hit[i / blocks], k0 = i % blocks * K_BLOCK;
    int64_t first = g->offsets[e], tokens = g->offsets[e + 1] - first, chunks = (tokens + CHUNK - 1) / CHUNK;
    if (tokens <= g->few) return;
    for (int64_t c = 0; c < chunks; c++) {
        int64_t begin = tokens * c / chunks, here = tokens * (c + 1) / chunks - begin;
        for (int64_t t = 0, r = first + begin; t < here; t++, r++) {
            const Element *x = (const Element *)g->rows + (g->index ? g->index[r] : r) * g->stride;
            Element *out = (Element *)g->leads + (first + begin) * g->K_steps + t * 32;
            for (int64_t k = k0; k < MIN(k0 + K_BLOCK, g->K_steps); k += 32) *(M *)(out + k * here) = NAME(at)(x + k);
        }
    }
}
#define WEAVE NAME(weave_item)

/* 16 weight rows, n elements, dequantized: out[n / 2 pairs][row][2]. next, next_sf: the next tile's codes and scales
   at this place, to prefetch. */
INLINE TARGET void NAME(unpack)(const Staged *from, int64_t n, M *out, const uint8_t *next, const uint8_t *next_sf) {
    for (int64_t i = 0; i < n / 8; i++) {
        M v[4];
        NAME(pairs)(from, i, v);
        __builtin_prefetch(next + 64 * i);
        if (i % 8 == 0) __builtin_prefetch(next_sf + 8 * i);
        UNROLL for (int u = 0; u < 4; u++) out[i / 16 * 64 + u * 16 + i % 16] = v[u];
    }
}

/* sums[tokens][TILE] += x by w over n elements: x [n / 32][tokens][32], w [4][n / 2 pairs][16 rows][2], the four groups
   of rows K_BLOCK * 16 apart. Two tiles of tokens by two of rows at a time; a last single tile of tokens by four. */
static TARGET void NAME(multiply_tiles)(int64_t tokens, const Element *w, const Element *x, int64_t n, int first, float *sums) {
    const int64_t rows = 16 * K_BLOCK, line = TILE * 4; /* elements, bytes */
    int64_t t = 0;
    for (; tokens - t > 16; t += 32)
        for (int64_t j = 0; j < TILE; j += 32) {
            float *out = sums + t * TILE + j;
            const Element *a = x + t * 32, *b = w + j * K_BLOCK;
            if (first) { tile_zero(0); tile_zero(1); tile_zero(2); tile_zero(3); }
            else {
                tile_load(0, out, line); tile_load(1, out + 16, line);
                tile_load(2, out + 16 * TILE, line); tile_load(3, out + 16 * TILE + 16, line);
            }
            for (int64_t k = 0; k < n; k += 32, a += tokens * 32, b += 512) {
                tile_load(4, a, 64); tile_load(6, b, 64);
                tile_multiply(0, 4, 6);
                tile_load(7, b + rows, 64);
                tile_multiply(1, 4, 7);
                tile_load(5, a + 512, 64);
                tile_multiply(2, 5, 6); tile_multiply(3, 5, 7);
            }
            tile_store(0, out, line); tile_store(1, out + 16, line);
            tile_store(2, out + 16 * TILE, line); tile_store(3, out + 16 * TILE + 16, line);
        }
    if (t >= tokens) return;
    float *out = sums + t * TILE;
    const Element *a = x + t * 32, *b = w;
    if (first) { tile_zero(0); tile_zero(1); tile_zero(2); tile_zero(3); }
    else { tile_load(0, out, line); tile_load(1, out + 16, line); tile_load(2, out + 32, line); tile_load(3, out + 48, line); }
    for (int64_t k = 0; k < n; k += 32, a += tokens * 32, b += 512) {
        tile_load(4, a, 64);
        tile_load(5, b, 64);
        tile_multiply(0, 4, 5);
        tile_load(6, b + rows, 64);
        tile_multiply(1, 4, 6);
        tile_load(7, b + 2 * rows, 64);
        tile_multiply(2, 4, 7);
        tile_load(5, b + 3 * rows, 64);
        tile_multiply(3, 4, 5);
    }
    tile_store(0, out, line); tile_store(1, out + 16, line); tile_store(2, out + 32, line); tile_store(3, out + 48, line);
}

#elif defined(LEADS)

/* As multiply, for one vector of rows, decoded on the way, by nt tokens side by side in x. If w is not NULL, it gets
   the weights, for the other tokens. next, next_sf: the next tile's codes and scales at this place, to prefetch. */
INLINE TARGET void NAME(multiply_codes)(int nt, const Staged *from, int64_t n, const Element *x, int first,
                                        float *sums, M *w, const uint8_t *next, const uint8_t *next_sf) {
    V s[LEAD];
    UNROLL for (int t = 0; t < nt; t++) s[t] = first ? (V){0} : *(V *)(sums + t * TILE);
    for (int64_t i = 0; i < n / 8; i++) {
        M v[4];
        NAME(pairs)(from, i, v);
        __builtin_prefetch(next + 64 * i);
        if (i % 8 == 0) __builtin_prefetch(next_sf + 8 * i);
        UNROLL for (int u = 0; u < 4; u++) {
            int64_t at = i / 16 * 64 + u * 16 + i % 16;
            if (w) w[at * NP] = v[u];
            UNROLL for (int t = 0; t < nt; t++) s[t] = NAME(mul_add)(s[t], v[u], NAME(spread)(x + (at * nt + t) * 2));
        }
    }
    UNROLL for (int t = 0; t < nt; t++) *(V *)(sums + t * TILE) = s[t];
}
static TARGET void NAME(lead)(int nt, const Staged *from, int64_t n, const Element *x, int first,
                              float *sums, M *w, const uint8_t *next, const uint8_t *next_sf) {
#define CASE(c) case c: NAME(multiply_codes)(c, from, n, x, first, sums, w, next, next_sf); break;
    switch (nt) { CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16) CASE(17) CASE(18) CASE(19) CASE(20) }
#undef CASE
}

/* The first tokens of an expert, side by side: at expert's first row + begin, [K_steps / 2][lead][2] */
static TARGET void NAME(weave_item)(const void *problem, int64_t i, int64_t next, int thread) {
    (void)next, (void)thread;
    const Gemm *g = problem;
    int64_t blocks = (g->K_steps + K_BLOCK - 1) / K_BLOCK, e = g->hit[i / blocks], k = i % blocks * K_BLOCK;
    int64_t first = g->offsets[e], tokens = g->offsets[e + 1] - first, chunks = (tokens + CHUNK - 1) / CHUNK;
    if (tokens <= g->few) return;
    for (int64_t c = 0; c < chunks; c++) {
        int64_t begin = tokens * c / chunks, lead = lead_of(tokens * (c + 1) / chunks - begin);
        const Element *x[LEAD];
        for (int64_t t = 0; t < lead; t++) {
            int64_t r = first + begin + t;
            x[t] = (const Element *)g->rows + (g->index ? g->index[r] : r) * g->stride + k;
        }
        NAME(weave)(x, lead, MIN(K_BLOCK, g->K_steps - k) / 2, (Element *)g->leads + (first + begin) * g->K_steps + k * lead);
    }
}
#define WEAVE NAME(weave_item)

#else
#define WEAVE NULL

/* TILE weight rows, n elements from k on, dequantized: out[group of NP * LANES rows][32 bits of K][row] */
static TARGET void NAME(block)(const Gemm *g, const Row *row, int64_t rows, int64_t k, int64_t n, Element *out) {
    for (int64_t j = 0; j < rows; j += LANES) {
        NAME(Rows) from;
        float scale[16 * LANES];
        NAME(find)(g, row + j, k, n, &from);
        for (int64_t i = 0; i < LANES; i++) NAME(block_scales)(from.sf + 16 * i, scale + 16 * i);
        M *to = (M *)out + j / (NP * LANES) * (K_BLOCK / (WIDTH / LANES)) * NP + j / LANES % NP;
        for (int64_t i = 0; i < n; i += STEP, to += 2 * LANES * NP) {
            uint8_t now[LANES * LANES];
            NAME(transpose)(from.codes + i / 2, from.stride, now);
            for (int64_t u = 0; u < LANES; u++) {
                V plane[2], s = *(V *)(scale + (i + 2 * u) / 16 * LANES);
                NAME(decode)(now + u * LANES, plane);
                to[u * NP] = plane[0] * s, to[(LANES + u) * NP] = plane[1] * s;
            }
        }
    }
}
#endif

/* The tile's rows of weights, their global scales and biases. */
typedef struct { int64_t n0, n; Row row[TILE]; float scale[TILE], bias[TILE]; } NAME(Tile);

/* Applies scales, bias and gate to row r of the result, v [columns], and stores it. */
static TARGET void NAME(finish)(const Gemm *g, const NAME(Tile) *tile, int64_t r, float *restrict v) {
    int64_t n = tile->n;
    int64_t to = (g->target ? g->target[r] : r) * g->width + tile->n0;
    float x_scale = g->x_scale ? g->x_scale[r] : 1.0f, h[TILE];
    if (!g->paired && g->gate != RELU2 && n == TILE && g->out_type == FP32) { /* GEMM 2: straight into out */
        float *restrict out = (float *)g->out + to;
        for (int64_t j = 0; j < TILE; j++) out[j] = v[j] * tile->scale[j] * x_scale + tile->bias[j];
        return;
    }
    for (int64_t j = 0; j < TILE; j++) v[j] = v[j] * tile->scale[j] * x_scale + tile->bias[j];
    if (g->gate == RELU2)
        for (int64_t j = 0; j < TILE; j++) v[j] = v[j] < 0 ? 0 : v[j] * v[j];
    if (g->paired) {
        float limit = g->limit, before = g->clamp_after ? __builtin_inff() : limit;
        float after = g->clamp_after ? limit : __builtin_inff();
        /* gelu's (1 + tanh(z)) / 2 is sigmoid(2z); z = a * (linear + cubic * a * a) */
        float linear = g->gate == SILU ? g->alpha : 1.5957691216f, cubic = g->gate == SILU ? 0 : 0.0713548163f;
        for (int64_t j = 0; j < TILE / 2; j++) {
            float a = v[j], u = v[TILE / 2 + j];
            a = a > before ? before : a, u = u > limit ? limit : u;
            u = u < -limit ? -limit : u;
            float b = a > 1e9f ? 1e9f : a < -1e9f ? -1e9f : a; /* so that its square is finite */
            a = a / (1.0f + exponential(-b * (linear + cubic * b * b)));
            a = a > after ? after : a;
            h[j] = a * (u + g->up_offset);
        }
    }
    if (g->paired && n == TILE / 2) store_all(g->out, (int)g->out_type, to, h, TILE / 2); /* lengths the compiler knows */
    else if (!g->paired && n == TILE) store_all(g->out, (int)g->out_type, to, v, TILE);
    else store_all(g->out, (int)g->out_type, to, g->paired ? h : v, n);
}

/* Multiplies one tile of an expert's weight rows by all its tokens. */
static TARGET void NAME(item)(const void *problem, int64_t i, int64_t next, int thread) {
    const Gemm *g = problem;
    if (g->parts && !brought(g, i)) return;
    NAME(Tile) tile;
    int64_t e = g->hit[hit_of(g, i)], n0 = first_row(g, i), n = MIN(g->tile, g->width - n0);
    int64_t first = g->offsets[e], tokens = g->offsets[e + 1] - first;
    tile.n0 = n0, tile.n = n;
    const Row begin[2] = {item_at(g, i, 0), item_at(g, i, (int)g->paired)};
    const int64_t K2 = g->K / 2, K16 = g->K / 16;
    for (int64_t j = 0; j < TILE; j++) { /* [outputs] or [gate, up]; a tile that is not full repeats the last row */
        int64_t row = j < g->tile ? n0 + MIN(j, n - 1) : n0 + MIN(j - g->tile, n - 1) + g->split;
        tile.scale[j] = row < g->split ? g->first_scale[e] : g->rest_scale[e];
        tile.bias[j] = g->bias ? load(g->bias, (int)g->bias_type, e * g->N + row) : 0;
    }
    for (int64_t j = 0; j < TILE; j++) {
        int64_t half = j >= g->tile, in = MIN(j - half * g->tile, n - 1);
        tile.row[j] = (Row){begin[half].codes + in * K2, begin[half].sf + in * K16, begin[half].end};
    }
    if (g->parts == 2 && !g->paired && n0 < g->N / 2 && n0 + n > g->N / 2) /* the tile is in both parts */
        for (int64_t j = 0; j < TILE; j++) tile.row[j] = row_at(g, e, n0 + MIN(j, n - 1));
    const Element *x[NX > NT ? NX : NT];
#define TOKENS(n) for (int64_t t = 0; t < (n); t++) { \
        int64_t r = first + t0 + t; \
        x[t] = (const Element *)g->rows + (g->index ? g->index[r] : r) * g->stride; \
    }
    if (tokens <= g->few) {
        Scale *scales = (Scale *)(g->work + thread * g->work_bytes);
        float out[NT * TILE];
        int64_t stride = (g->K_steps / 16 + SCALES - 1) / SCALES * SCALES + 16, full = n == g->tile ? TILE : n;
        for (int64_t i = 0, groups = (tokens + NT - 1) / NT; i < groups; i++) {
            int64_t t0 = tokens * i / groups, nt = tokens * (i + 1) / groups - t0;
#if INTEGERS
            for (int64_t t = 0; t < nt; t++) {
                int64_t at = g->index ? g->index[first + t0 + t] : g->few_at[e] + t0 + t;
                x[t] = (const Element *)(const void *)(g->integers + at * g->integer_stride);
            }
#else
            TOKENS(nt)
#endif
            for (int64_t j = 0; j < TILE; j += NR) {
                if (j >= full && (j < g->tile || j >= g->tile + n)) continue;
                const uint8_t *codes[NR];
                const Scale *sf[NR];
                int64_t K = g->K_steps; /* whole steps: the next row's codes meet zeros; the last rows must end at g->K */
                for (int r = 0; r < NR; r++) {
                    const Row row = tile.row[j + r];
                    NAME(row_scales)(row.sf, row.end, g->K / 16, scales + r * stride);
                    sf[r] = scales + r * stride, codes[r] = row.codes;
                    if ((row.end - row.sf) * 8 < g->K_steps / 2) K = g->K; /* 8 bytes of codes per byte of sf */
                }
                NAME(few_tokens)((int)nt, codes, sf, K, x, out + j);
            }
            for (int64_t t = 0; t < nt; t++) NAME(finish)(g, &tile, first + t0 + t, out + t * TILE);
        }
        return;
    }
#ifdef WOVEN
    const Row ahead[2] = {item_at(g, next, 0), item_at(g, next, (int)g->paired)}; /* the next tile's, to prefetch */
#endif
    Element *w = (Element *)(g->work + thread * g->work_bytes);
    float *sums = (float *)(w + TILE * K_BLOCK);
    int64_t panel = NP * LANES, rows = !g->paired && n < TILE ? (n + panel - 1) / panel * panel : TILE;
    for (int64_t c = 0, chunks = (tokens + CHUNK - 1) / CHUNK; c < chunks; c++) {
        int64_t begin = tokens * c / chunks, here = tokens * (c + 1) / chunks - begin;
#ifdef WOVEN
        const Element *woven = (const Element *)g->leads + (first + begin) * g->K_steps;
#endif
#if defined(LEADS)
        int64_t lead = lead_of(here);
#elif defined(TILES)
        int64_t lead = here;
        tiles_begin();
#else
        int64_t lead = 0;
#endif
        int64_t rest = here - lead, groups = (rest + NX - 1) / NX;
        for (int64_t k = 0; k < g->K_steps; k += K_BLOCK) {
            int64_t columns = MIN(K_BLOCK, g->K_steps - k);
#ifdef WOVEN
            for (int64_t j = 0; j < rows; j += LANES) {
                NAME(Rows) from;
                Staged staged;
                int64_t half = g->paired && j >= g->tile, in_tile = (j - half * g->tile) * g->K + LANES * k;
                const Row then = ahead[half];
                NAME(find)(g, tile.row + j, k, columns, &from);
                NAME(stage)(from.codes, from.stride, from.sf, columns, &staged);
#ifdef TILES
                NAME(unpack)(&staged, columns, (M *)(w + j * K_BLOCK), then.codes + in_tile / 2, then.sf + in_tile / 16);
#else
                NAME(lead)((int)lead, &staged, columns, woven + k * lead, k == 0, sums + j,
                           rest ? (M *)w + j / LANES : NULL, then.codes + in_tile / 2, then.sf + in_tile / 16);
#endif
            }
#ifdef TILES
            NAME(multiply_tiles)(here, w, woven + k * here, columns, k == 0, sums);
#endif
#else
            NAME(block)(g, tile.row, rows, k, columns, w);
#endif
            for (int64_t i = 0; i < groups; i++) {
                int64_t t0 = begin + lead + rest * i / groups, nt = begin + lead + rest * (i + 1) / groups - t0;
                if (!lead && begin == 0) prefetch_tile(g, next, k + columns * i / groups, columns / groups);
                TOKENS(nt)
                for (int64_t t = 0; t < nt; t++) x[t] += k;
                for (int64_t j = 0; j < rows; j += panel)
                    NAME(many_tokens)((int)nt, w + j * K_BLOCK, x, columns * (int64_t)sizeof(Element) / 4, k == 0,
                                      sums + (t0 - begin) * TILE + j);
            }
        }
#ifdef TILES
        tiles_end();
#endif
        for (int64_t t = 0; t < here; t++) NAME(finish)(g, &tile, first + begin + t, sums + t * TILE);
    }
#undef TOKENS
}

/* n elements of x from `at` on as fp32; all after the first `width` are zeros */
static TARGET void NAME(expand)(const void *x, int type, int64_t at, int64_t width, int64_t n, float *out) {
    const uint16_t *half = (const uint16_t *)x + at;
    int64_t have = MIN(width, n);
    if (type == FP32) memcpy(out, (const float *)x + at, 4 * have);
    else if (type == BF16) for (int64_t k = 0; k < have; k++) out[k] = number((uint32_t)half[k] << 16);
    else for (int64_t k = 0; k < have; k++) out[k] = from_f16(half[k]);
    for (int64_t k = have; k < n; k++) out[k] = 0;
}

/* Row r of x as fp32, with zeros up to a whole step. Returns 0 if the row is not routed, and so not used. */
static TARGET int NAME(row)(const Gemm *g, int64_t r, float *v) {
    if (g->x_type != NVFP4) {
        NAME(expand)(g->x, (int)g->x_type, r * g->x_width, g->x_width, g->K_steps, v);
        return 1;
    }
    const uint8_t *codes = (const uint8_t *)g->x + r * g->x_width / 2;
    int64_t e = expert_of(g->offsets, g->E, r), K16 = g->x_width / 16;
    if (e == g->E) return 0;
    for (int64_t b = 0; b < K16; b++) {
        float sf = from_e4m3(g->x_sf[sf_offset(r + g->padded[e], b, K16)]);
        for (int64_t i = 0; i < 8; i++) {
            v[16 * b + 2 * i] = E2M1[codes[8 * b + i] & 15] * sf;
            v[16 * b + 2 * i + 1] = E2M1[codes[8 * b + i] >> 4] * sf;
        }
    }
    for (int64_t k = g->x_width; k < g->K_steps; k++) v[k] = 0;
    return 1;
}

/* Row r of x -> g->rows: the planes of each step. In amx, for experts with few tokens: integers -> g->integers. */
static TARGET void NAME(arrange)(const void *problem, int64_t r, int64_t next, int thread) {
    (void)next;
    const Gemm *g = problem;
    Element *out = (Element *)g->rows + r * g->stride;
    float *v = (float *)(g->work + thread * g->work_bytes);
#if INTEGERS
    int64_t at = integers_at(g, r);
    if (at >= 0) {
        if (!NAME(row)(g, r, v)) return;
        NAME(integers)(v, g->K_steps, (int8_t *)g->integers + at * g->integer_stride);
        if (!g->many_rows || !g->index) return;
    }
#endif
    if (g->x_type == BF16 && sizeof(Element) == 2 && g->x_width == g->K_steps) { /* without conversion */
        const uint16_t *x = (const uint16_t *)g->x + r * g->x_width;
        for (int64_t k = 0; k < g->K_steps; k += STEP)
            for (int64_t i = 0; i < WIDTH; i++)
                UNROLL for (int p = 0; p < PLANES; p++) out[k + p * WIDTH + i] = (Element)x[k + PLANES * i + p];
        return;
    }
    if (!NAME(row)(g, r, v)) return;
    for (int64_t k = 0; k < g->K_steps; k += STEP)
        for (int64_t i = 0; i < WIDTH; i++)
            UNROLL for (int p = 0; p < PLANES; p++) {
                float value = v[k + PLANES * i + p];
                out[k + p * WIDTH + i] = sizeof(Element) == 4 ? (Element)value : (Element)(bits(value) >> 16);
            }
}

/* Row `from` of x -> NVFP4, bit for bit as format.quantize: true divisions, ties to even, NaN in sf. given: the global
   scale, or NULL to derive one from the row. sf: the block scales, side by side. Returns the global scale. */
static TARGET float NAME(quantize_row)(const Quantize *q, int64_t from, const float *given, uint8_t *codes, uint8_t *sf) {
    float x[512], gs = given ? *given : 1.0f;
    from *= q->width;
    if (!given) {
        uint32_t amax = 0; /* as bits: the order of magnitudes, with NaN above infinity */
        for (int64_t k = 0; k < q->width; k += 512) {
            NAME(expand)(q->x, (int)q->x_type, from + k, q->width - k, 512, x);
            for (int64_t i = 0; i < 512; i++) amax = (bits(x[i]) & 0x7fffffff) > amax ? bits(x[i]) & 0x7fffffff : amax;
        }
        gs = number(amax) / (q->four_over_six ? 6 * 256.0f : 6 * 448.0f);
        gs = amax == 0 ? 1.0f : gs < 0x1p-126f ? 0x1p-126f : gs;
    }
    for (int64_t k = 0; k < q->K; k += 512, codes += 256, sf += 32) {
        int64_t blocks = MIN(32, (q->K - k) / 16);
        uint32_t largest[32] = {0};
        uint8_t six[32], four[32];
        NAME(expand)(q->x, (int)q->x_type, from + k, q->width - k, 512, x);
        for (int64_t b = 0; b < blocks; b++) largest[b] = largest_of(x + 16 * b);
        scales_by_code(largest, 6.0f, gs, six);
        if (q->four_over_six && gs >= 0x1p-100f && gs <= 0x1p100f) {
            scales_by_code(largest, 4.0f, gs, four);
            float by_six[32], by_four[32];
            squared_errors(x, six, gs, blocks, by_six), squared_errors(x, four, gs, blocks, by_four);
            for (int64_t b = 0; b < 32; b++)
                six[b] = six[b] >= 8 && six[b] != 0x7f && by_four[b] < by_six[b] ? four[b] : six[b];
        }
        for (int64_t b = 0; b < blocks; b++) encode_block(x + 16 * b, six[b], gs, codes + 8 * b);
        memcpy(sf, six, (size_t)blocks);
    }
    return gs;
}

static TARGET void NAME(quantize_token)(const void *problem, int64_t t, int64_t next, int thread) {
    (void)next, (void)thread;
    const Quantize *q = problem;
    uint8_t *to = q->tokens + t * token_bytes(q);
    float gs = NAME(quantize_row)(q, t, NULL, to, to + q->K / 2);
    memcpy(to + q->K / 16 * 9, &gs, 4);
}

/* Quantizes row r with its expert's scale or its own, or copies its token if that is quantized already. */
static TARGET void NAME(quantize)(const void *problem, int64_t r, int64_t next, int thread) {
    (void)next;
    const Quantize *q = problem;
    int64_t K16 = q->K / 16, from = q->index ? q->index[r] : r, padded = r, e = expert_of(q->offsets, q->E, r);
    for (int64_t i = 0; i < e; i++) padded += (q->offsets[i] - q->offsets[i + 1]) & 127;
    const float one = 1.0f, *given = !q->scale ? NULL : e < q->E ? q->scale + e : &one;
    uint8_t *codes = q->codes + r * q->K / 2, *own = q->work + thread * q->work_bytes;
    const uint8_t *sf = own;
    if (q->tokens) {
        const uint8_t *token = q->tokens + from * token_bytes(q);
        memcpy(codes, token, q->K / 2), memcpy(&q->row_scale[r], token + 9 * K16, 4);
        sf = token + q->K / 2;
    } else q->row_scale[r] = NAME(quantize_row)(q, from, given, codes, own);
    for (int64_t b = 0; b < K16 && e < q->E; b++) q->sf[sf_offset(padded, b, K16)] = sf[b];
}

/* Computes one part of a token's result: its slots, weighted and added in fp32, in order. */
static TARGET void NAME(combine)(const void *problem, int64_t i, int64_t next, int thread) {
    (void)next, (void)thread;
    const Combine *c = problem;
    float sum[64];
    int64_t parts = parts_of(c->H), t = i / parts, h0 = i % parts * PART;
    for (int64_t h = h0; h < MIN(h0 + PART, c->H); h += 64) {
        int64_t n = MIN(64, c->H - h);
        memset(sum, 0, sizeof sum);
        for (int64_t j = 0; j < c->top_k; j++) {
            float weight = load(c->weights, (int)c->weights_type, t * c->top_k + j);
            const float *restrict slot = c->slots + (t * c->top_k + j) * c->H + h;
            if (n == 64) for (int64_t i = 0; i < 64; i++) sum[i] += weight * slot[i];
            else for (int64_t i = 0; i < n; i++) sum[i] += weight * slot[i];
        }
        store_all(c->out, (int)c->out_type, t * c->H + h, sum, n);
    }
}

/* low = x * A^T of a row. */
static TARGET void NAME(shrink_rows)(const void *problem, int64_t r, int64_t next, int thread) {
    (void)next, (void)thread;
    const LowRank *l = problem;
    int64_t g = group_of(l, r), row = l->index ? l->index[r] / l->slots : r;
    float *low = l->low + r * l->rank, x[PART], a[PART];
    if (g < 0) return;
    memset(low, 0, 4 * l->rank);
    for (int64_t k = 0; k < l->K; k += PART) {
        int64_t n = MIN(PART, l->K - k);
        load_all(l->x, (int)l->type, row * l->K + k, x, n);
        for (int64_t j = 0; j < l->rank; j++) {
            load_all(l->a, (int)l->type, (g * l->rank + j) * l->K + k, a, n);
            low[j] += dot(x, a, n, 32);
        }
    }
}

/* out += low * B^T, for a part of a row's columns. */
static TARGET void NAME(expand_rows)(const void *problem, int64_t i, int64_t next, int thread) {
    (void)next, (void)thread;
    const LowRank *l = problem;
    int64_t parts = parts_of(l->N), r = i / parts, first = i % parts * PART, g = group_of(l, r);
    int64_t n = MIN(PART, l->N - first), at = (l->target ? l->target[r] : r) * l->N + first;
    const float *low = l->low + r * l->rank;
    float sum[PART], b[PART];
    if (g < 0) return;
    load_all(l->out, (int)l->type, at, sum, n);
    int64_t each = MIN(l->rank, PART), rows = PART / each; /* of B, that are loaded at once */
    for (int64_t c = 0; c < n; c += rows)
        for (int64_t j = 0; j < l->rank; j += each) {
            int64_t some = MIN(rows, n - c), m = MIN(each, l->rank - j);
            load_all(l->b, (int)l->type, (g * l->N + first + c) * l->rank + j, b, some * m);
            for (int64_t q = 0; q < some; q++) sum[c + q] += dot(low + j, b + q * m, m, 8);
        }
    store_all(l->out, (int)l->type, at, sum, n);
}

static const Path NAME(path) = {
    NAME(arrange), WEAVE, NAME(item), NAME(quantize), NAME(quantize_token), NAME(combine), NAME(shrink_rows),
    NAME(expand_rows), sizeof(Element), STEP, FEW, INTEGERS};
#endif

#undef LANES
#undef WIDTH
#undef PLANES
#undef TILES
#undef WOVEN
#undef INTEGERS
#undef Scale
#undef SCALES
#undef STEP
#undef PATH
#undef NUMBER
#undef LEADS
#undef TARGET
#undef V
#undef M
#undef Element
#undef NR
#undef NT
#undef NP
#undef NX
#undef FEW
#undef WEAVE
