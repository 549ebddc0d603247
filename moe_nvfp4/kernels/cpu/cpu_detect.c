/* Which paths of cpu.c this compiler can make and this machine can run: backend.py asks before it compiles one. */

#include <stdint.h>

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#define HAS_BF16
#endif
#if defined(HAS_BF16) && (defined(__linux__) || defined(EMULATE_AMX))
#define HAS_AMX /* needs an assembler that knows the instructions: binutils 2.34 or newer */
#endif

#if defined(HAS_AMX) && !defined(EMULATE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether there are AMX tiles with bf16 products, and Linux lets this process use them. A process must ask, because
   tiles make the state of a thread large (ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA). */
static int has_amx(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1
        && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#elif defined(EMULATE_AMX)
static int has_amx(void) { return 1; }
#endif

/* Bit i: whether path i can run, in the order of PATHS in backend.py. */
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
#ifdef HAS_AMX
    if (can & 8 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") && has_amx()) can |= 32;
#endif
#elif defined(__aarch64__)
    can |= 16;
#endif
    return can;
}
