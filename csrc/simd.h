// One source, several instruction sets: the loader selects the best version for the CPU at run time.
// Only on x86-64 Linux with GCC 12 or later; elsewhere, and for ThreadSanitizer, whose runtime is not ready when versions are
// selected, one baseline version is compiled.
#pragma once

#include <cstddef>  // defines __GLIBC__

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define RLSTORE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define RLSTORE_HAS_CLONES
#else
#define RLSTORE_CLONES
#endif

// Helpers must be inlined into each version, or they would be compiled for the baseline only.
#define RLSTORE_INLINE inline __attribute__((always_inline))

namespace rlstore {

// The instruction set of the selected version; "baseline" if it is the plain one, "" if no other was compiled.
inline const char* instruction_set() {
#ifdef RLSTORE_HAS_CLONES
  if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
  if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
  return "baseline";
#else
  return "";
#endif
}

// For memory that is read later and may be far from the core. Into the second cache: several times as many lines can be on their way
// to it as to the first, so the misses of a whole batch overlap.
RLSTORE_INLINE void prefetch_far(const void* memory) { __builtin_prefetch(memory, 0, 2); }
}  // namespace rlstore
