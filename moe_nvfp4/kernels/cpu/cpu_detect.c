/* Which paths of cpu.c this machine can run and this compiler make: cpu.py asks before it compiles one of them. */

#include <stdint.h>

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define HAS_BF16
#endif

/* Bit i for the path that cpu.py counts as i. */
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
#elif defined(__aarch64__)
    can |= 16;
#endif
    return can;
}
