/* The CPU kernels without Python: GEMMs of random problems on every path of this machine against a naive loop in
   double. For machines that torch is not at hand on:

   zig cc -target aarch64-linux-musl -O2 -I moe_nvfp4/kernels/cpu tests/kernels/cpu_standalone.c && qemu-aarch64-static ./a.out */

#include <stdio.h>
#include "cpu.c"

static uint32_t state = 1;
static int64_t below(int64_t n) { return (int64_t)((state = state * 1664525 + 1013904223) >> 8) % n; }

static double value(const uint8_t *codes, const uint8_t *sf, int64_t row, int64_t K, int64_t k) {
    static const double MAGNITUDES[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    int code = codes[row * K / 2 + k / 2] >> (k % 2 ? 4 : 0) & 15, byte = sf[row * K / 16 + k / 16];
    double scale = byte < 8 ? byte / 512.0 : __builtin_ldexp(8 + byte % 8, byte / 8 - 10);
    return (code & 8 ? -1 : 1) * MAGNITUDES[code & 7] * scale;
}

/* One GEMM of R rows in E experts, fp32 or bf16 rows; returns the largest error over the largest result. */
static double check(int64_t path, int64_t E, int64_t N, int64_t K, int64_t R, int x_type) {
    uint8_t *codes = malloc((size_t)(E * N * K / 2)), *sf = malloc((size_t)(E * N * K / 16));
    float *x = malloc((size_t)(4 * R * K)), *out = malloc((size_t)(4 * R * N)), *scale = malloc((size_t)(4 * E));
    uint16_t *half = malloc((size_t)(2 * R * K));
    int32_t *offsets = calloc((size_t)E + 1, 4);
    for (int64_t i = 0; i < E * N * K / 2; i++) codes[i] = (uint8_t)below(256);
    for (int64_t i = 0; i < E * N * K / 16; i++) sf[i] = (uint8_t)below(0x7f);
    for (int64_t i = 0; i < R * K; i++) half[i] = to_bf16((float)(below(2001) - 1000) / 1000), x[i] = load(half, BF16, i);
    for (int64_t e = 0; e < E; e++) scale[e] = 1 + (float)e;
    for (int64_t r = 0; r < R; r++) offsets[1 + below(E)]++;
    for (int64_t e = 0; e < E; e++) offsets[e + 1] += offsets[e];

    struct { int64_t kind, words; Gemm gemm; } program = {GEMM, offsetof(Gemm, rows) / 8, {
        .x = x_type == FP32 ? (void *)x : half, .offsets = offsets, .codes = codes, .sf = sf, .first_scale = scale,
        .rest_scale = scale, .out = out, .x_type = x_type, .x_rows = R, .x_width = K, .R = R, .E = E, .N = N, .K = K,
        .width = N, .gate = RAW}};
    double worst = run(&program.kind, 1, path, 2, NULL) ? 1 : 0, most = 0;
    for (int64_t e = 0; e < E; e++)
        for (int64_t r = offsets[e]; r < offsets[e + 1]; r++)
            for (int64_t n = 0; n < N; n++) {
                double sum = 0;
                for (int64_t k = 0; k < K; k++) sum += value(codes, sf, e * N + n, K, k) * x[r * K + k];
                double error = __builtin_fabs(sum * scale[e] - out[r * N + n]);
                worst = !(error <= worst) ? error : worst, most = __builtin_fabs(sum) > most ? __builtin_fabs(sum) : most;
            }
    free(codes), free(sf), free(x), free(half), free(out), free(scale), free(offsets);
    return most > 0 ? worst / most : worst;
}

int main(void) {
    static const char *const NAMES[] = {"portable", "avx2", "avx512", "avx512bf16", "neon", "amx"};
    int64_t can = paths(), bad = 0;
    for (int64_t path = 0; path < 6; path++) {
        double worst = 0;
        if (!(can >> path & 1)) continue;
        for (int i = 0; i < 60; i++) {
            int x_type = below(2) && path != 3 && path != 5 ? FP32 : BF16; /* these two take no others */
            double error = check(path, 1 + below(3), 1 + below(150), 16 * (1 + below(40)), below(90), x_type);
            worst = !(error <= worst) ? error : worst;
        }
        printf("%s: relative error %.1e\n", NAMES[path], worst);
        bad += !(worst < (path == 5 ? 1e-4 : 1e-5)); /* as THRESHOLDS: amx multiplies integers */
    }
    return bad != 0;
}
