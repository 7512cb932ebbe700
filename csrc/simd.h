// One source, several instruction sets: the loader picks the best version for the machine at run time.
// Elsewhere than on x86-64 Linux with GCC 12 or later the plain version is compiled.
#pragma once

#include <cstddef>  // and with it __GLIBC__

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define RLSTORE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define RLSTORE_CLONES
#endif

// Helpers must be inlined into each version, or they would be compiled for the plain one only.
#define RLSTORE_INLINE inline __attribute__((always_inline))
