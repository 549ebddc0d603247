/* The tile registers of AMX (cpu.c includes this file): eight of 16 rows of 64 bytes. With -DEMULATE_AMX they are plain
   C, so that the path that uses them is tested on any machine with AVX-512 BF16.

   tile_multiply(c, a, b)   c[m][n] += sum over 32 k of a[m][k] * b[k / 2][2 n + k % 2], a and b bf16, c fp32  */

#ifdef EMULATE_AMX
static _Thread_local union { float fp32[16][16]; uint16_t bf16[16][32]; uint8_t row[16][64]; } tile_registers[8];
static inline void tiles_begin(void) {}
static inline void tiles_end(void) {}
static inline void tile_zero(int t) { memset(&tile_registers[t], 0, 1024); }
static inline void tile_load(int t, const void *from, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(tile_registers[t].row[r], (const char *)from + r * stride, 64);
}
static inline void tile_store(int t, void *to, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((char *)to + r * stride, tile_registers[t].row[r], 64);
}
static inline void tile_multiply(int c, int a, int b) {
    for (int m = 0; m < 16; m++) for (int k = 0; k < 32; k++) for (int n = 0; n < 16; n++)
        tile_registers[c].fp32[m][n] += number((uint32_t)tile_registers[a].bf16[m][k] << 16)
                                      * number((uint32_t)tile_registers[b].bf16[k / 2][2 * n + k % 2] << 16);
}
#else
/* Inline assembly, because the intrinsics do not tell the compilers that memory is read and written. */
#define tile_zero(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define tile_load(t, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t :: "r"((const void *)(from)), "r"((int64_t)(stride)) : "memory")
#define tile_store(t, to, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" :: "r"((void *)(to)), "r"((int64_t)(stride)) : "memory")
#define tile_multiply(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
static inline void tiles_begin(void) {
    static const struct { uint8_t palette, start, reserved[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } SHAPES = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    __asm__ volatile("ldtilecfg %0" :: "m"(SHAPES));
}
static inline void tiles_end(void) { __asm__ volatile("tilerelease" ::: "memory"); } /* else a thread switch saves them */
#endif
