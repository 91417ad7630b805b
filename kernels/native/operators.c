/* The CPU's operators, called through ctypes (library.py). Plain C without anybody's headers: nothing is lost but speed
 * where it could not be built. All functions take contiguous float32 unless they say otherwise, and keep no state.
 */
#include <stdint.h>

/* Which results these sources calculate. Another number whenever a bit of any result changes: ranks compare it. */
#define NUMERICS 1

int whalepod_numerics(void) { return NUMERICS; }

/* Whether this processor has what the operators were compiled for. */
int whalepod_runs_here(void) {
#if defined(__x86_64__) && !defined(WHALEPOD_PLAIN)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

#if defined(__x86_64__) && !defined(WHALEPOD_PLAIN)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#endif

#include "vectors.h"

#include "products.c"
#include "rows.c"
#include "streams.c"
#include "records.c"
#include "experts.c"
#include "attention.c"
#include "choices.c"

#if defined(__clang__) && defined(__x86_64__) && !defined(WHALEPOD_PLAIN)
#pragma clang attribute pop
#endif
