/* Instruction sets of aarch64: how code is compiled for them, and what this processor has. Included by cpu.c.
 *
 * NEON itself is part of aarch64. Beyond it there are dot products of bytes (FEAT_DotProd) and products of matrices of bytes
 * (FEAT_I8MM). */

#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

/* Whether the compiler has these instructions for functions of their own. */
#ifdef __clang__
#if __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD)
#define KV_NEON_DOT 1
#endif
#if __clang_major__ >= 16 || defined(__ARM_FEATURE_MATMUL_INT8)
#define KV_NEON_I8MM 1
#endif
#define TARGET_NEON_DOT _Pragma("clang attribute push(__attribute__((target(\"dotprod\"))), apply_to = function)")
#define TARGET_NEON_I8MM _Pragma("clang attribute push(__attribute__((target(\"dotprod,i8mm\"))), apply_to = function)")
#define END_TARGET _Pragma("clang attribute pop")
#else
#define KV_NEON_DOT (__GNUC__ >= 9)
#define KV_NEON_I8MM (__GNUC__ >= 10)
#define TARGET_NEON_DOT _Pragma("GCC push_options") _Pragma("GCC target(\"arch=armv8.2-a+dotprod\")")
#define TARGET_NEON_I8MM _Pragma("GCC push_options") _Pragma("GCC target(\"arch=armv8.2-a+dotprod+i8mm\")")
#define END_TARGET _Pragma("GCC pop_options")
#endif

#if defined(__linux__)
static int has_neon_dot(void) { return getauxval(AT_HWCAP) >> 20 & 1; } /* HWCAP_ASIMDDP */

static int has_neon_i8mm(void) { return getauxval(AT_HWCAP2) >> 13 & 1; } /* HWCAP2_I8MM */
#elif defined(__APPLE__)
static int has_feature(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(name, &value, &size, NULL, 0) && value;
}

static int has_neon_dot(void) { return has_feature("hw.optional.arm.FEAT_DotProd"); }

static int has_neon_i8mm(void) { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#else /* what the compiler was told, then */
static int has_neon_dot(void) {
#ifdef __ARM_FEATURE_DOTPROD
    return 1;
#else
    return 0;
#endif
}

static int has_neon_i8mm(void) {
#ifdef __ARM_FEATURE_MATMUL_INT8
    return 1;
#else
    return 0;
#endif
}
#endif
