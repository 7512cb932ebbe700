#include "frames.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "rows.h"
#include "simd.h"

namespace rlstore {

namespace {

// Pieces that are put into a target in turn: `count` times one of each of `stack` sources, in which they are `apart` pieces apart.
struct Weave {
  char* target;
  const char* const* sources;
  size_t stack, apart, inner, count;
  size_t first = 0;  // pieces of each source that were passed over

  const char* source(size_t j) const { return sources[j] + first * apart * inner; }
  size_t width() const { return stack * inner; }

  // Takes the first `pieces` of each source off.
  Weave cut(size_t pieces) {
    Weave taken = *this;
    taken.count = pieces;
    target += pieces * width(), first += pieces, count -= pieces;
    return taken;
  }
};

// A piece as a number, wherever it is in memory.
template <size_t Bytes>
struct PieceOf;
template <>
struct PieceOf<1> {
  typedef uint8_t Type;
};
template <>
struct PieceOf<2> {
  typedef uint16_t __attribute__((aligned(1), may_alias)) Type;
};
template <>
struct PieceOf<4> {
  typedef uint32_t __attribute__((aligned(1), may_alias)) Type;
};

// With all sizes known the compiler makes this shuffles of whole registers.
template <size_t Inner, size_t Stack, size_t Apart>
RLSTORE_INLINE void weave_numbers(const Weave& weave) {
  typedef typename PieceOf<Inner>::Type Piece;
  Piece* __restrict out = reinterpret_cast<Piece*>(weave.target);
  const Piece* from[Stack];
  for (size_t j = 0; j < Stack; j++) from[j] = reinterpret_cast<const Piece*>(weave.source(j));
  const size_t count = weave.count;
  for (size_t o = 0; o < count; o++)
    for (size_t j = 0; j < Stack; j++) out[o * Stack + j] = from[j][o * Apart];
}

// Pieces of up to `Chunk` bytes, each copied as that many: what is too much is overwritten by the next one.
template <size_t Chunk, typename Stack>
RLSTORE_INLINE void weave_stack(const Weave& weave, Stack stack) {
  const size_t inner = weave.inner, step = weave.apart * inner, count = weave.count;
  const size_t exact = std::min(count, Chunk / inner + 1);  // at the end nothing is too much
  char* __restrict target = weave.target;
  const char* const* sources = weave.sources;
  const size_t passed = weave.first;
  const auto copy = [&](size_t first, size_t stop, auto size) {
    for (size_t o = first; o < stop; o++)
      for (size_t j = 0; j < stack; j++, target += inner) memcpy(target, sources[j] + (passed + o) * step, size);
  };
  copy(0, count - exact, std::integral_constant<size_t, Chunk>{});
  copy(count - exact, count, inner);
}

template <size_t Chunk>
RLSTORE_INLINE void weave_chunks(const Weave& weave) {
  switch (weave.stack) {
    case 1: return weave_stack<Chunk>(weave, std::integral_constant<size_t, 1>{});
    case 3: return weave_stack<Chunk>(weave, std::integral_constant<size_t, 3>{});
    case 4: return weave_stack<Chunk>(weave, std::integral_constant<size_t, 4>{});
    default: return weave_stack<Chunk>(weave, weave.stack);
  }
}

template <size_t Inner>
RLSTORE_INLINE void weave_pieces(const Weave& weave) {
  const bool puts = weave.apart == 1, takes = weave.stack == 1;
  if (puts && weave.stack == 2) return weave_numbers<Inner, 2, 1>(weave);
  if (puts && weave.stack == 3) return weave_numbers<Inner, 3, 1>(weave);
  if (puts && weave.stack == 4) return weave_numbers<Inner, 4, 1>(weave);
  if (takes && weave.apart == 2) return weave_numbers<Inner, 1, 2>(weave);
  if (takes && weave.apart == 3) return weave_numbers<Inner, 1, 3>(weave);
  if (takes && weave.apart == 4) return weave_numbers<Inner, 1, 4>(weave);
  weave_chunks<Inner>(weave);
}

RLSTORE_CLONES
void run(const Weave& weave) {
  const size_t inner = weave.inner;
  switch (inner) {
    case 1: return weave_pieces<1>(weave);
    case 2: return weave_pieces<2>(weave);
    case 3: return weave_chunks<4>(weave);
    case 4: return weave_pieces<4>(weave);
  }
  if (inner <= 8) return weave_chunks<8>(weave);
  if (inner <= 16) return weave_chunks<16>(weave);
  for (size_t o = 0; o < weave.count; o++)
    for (size_t j = 0; j < weave.stack; j++)
      memcpy(weave.target + (o * weave.stack + j) * inner, weave.source(j) + o * weave.apart * inner, inner);
}

#if defined(__SSE2__)

constexpr size_t kRegister = sizeof(__m128i);

// The numbers of `Bytes` bytes of the lower or of the upper halves of two registers, in turn.
template <size_t Bytes>
RLSTORE_INLINE __m128i lower(__m128i a, __m128i b) {
  return Bytes == 1 ? _mm_unpacklo_epi8(a, b) : Bytes == 2 ? _mm_unpacklo_epi16(a, b) : Bytes == 4 ? _mm_unpacklo_epi32(a, b) : _mm_unpacklo_epi64(a, b);
}
template <size_t Bytes>
RLSTORE_INLINE __m128i upper(__m128i a, __m128i b) {
  return Bytes == 1 ? _mm_unpackhi_epi8(a, b) : Bytes == 2 ? _mm_unpackhi_epi16(a, b) : Bytes == 4 ? _mm_unpackhi_epi32(a, b) : _mm_unpackhi_epi64(a, b);
}

// Whole registers of two or four sources.
template <size_t Inner, size_t Stack, typename Store>
RLSTORE_INLINE void weave_registers(const Weave& weave, Store store) {
  constexpr size_t kLine = 64, kAhead = 512;
  const char* from[Stack];
  for (size_t j = 0; j < Stack; j++) from[j] = weave.source(j);
  __m128i* target = reinterpret_cast<__m128i*>(weave.target);
  for (size_t i = 0; i < weave.count * Inner; i += kRegister, target += Stack) {
    __m128i in[Stack];
    for (size_t j = 0; j < Stack; j++) {
      if (i % kLine == 0) __builtin_prefetch(from[j] + i + kAhead);
      in[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[j] + i));
    }
    __m128i low = lower<Inner>(in[0], in[1]), high = upper<Inner>(in[0], in[1]);
    if constexpr (Stack == 2) {
      store(target, low), store(target + 1, high);
    } else {
      const __m128i other_low = lower<Inner>(in[2], in[3]), other_high = upper<Inner>(in[2], in[3]);
      store(target, lower<2 * Inner>(low, other_low)), store(target + 1, upper<2 * Inner>(low, other_low));
      store(target + 2, lower<2 * Inner>(high, other_high)), store(target + 3, upper<2 * Inner>(high, other_high));
    }
  }
}

template <typename Store>
void run_registers(const Weave& weave, Store store) {
  switch (weave.width()) {
    case 2: return weave_registers<1, 2>(weave, store);
    case 4: return weave.inner == 1 ? weave_registers<1, 4>(weave, store) : weave_registers<2, 2>(weave, store);
    case 8: return weave.inner == 2 ? weave_registers<2, 4>(weave, store) : weave_registers<4, 2>(weave, store);
    case 16: return weave_registers<4, 4>(weave, store);
  }
}

// Weaves what fills whole registers, from the first piece at which they can be stored; the rest is left in `weave`.
void weave_most(Weave* weave, bool streamed) {
  const bool fits = (weave->stack == 2 || weave->stack == 4) && (weave->inner == 1 || weave->inner == 2 || weave->inner == 4);
  if (!fits) return;
  const size_t before = (kRegister - reinterpret_cast<uintptr_t>(weave->target) % kRegister) % kRegister / weave->width();
  run(weave->cut(std::min(before, weave->count)));
  const size_t in_register = kRegister / weave->inner;
  const Weave whole = weave->cut(weave->count / in_register * in_register);
  if (streamed && reinterpret_cast<uintptr_t>(weave->target) % kRegister == 0)
    run_registers(whole, [](__m128i* target, __m128i value) { _mm_stream_si128(target, value); });
  else
    run_registers(whole, [](__m128i* target, __m128i value) { _mm_storeu_si128(target, value); });
}

#else

void weave_most(Weave*, bool) {}

#endif

bool is_zero(const char* bytes, size_t count) { return count == 0 || (bytes[0] == 0 && !memcmp(bytes, bytes + 1, count - 1)); }

}  // namespace

void interleave(char* target, const char* const* frames, const Observation& leaf, size_t first, size_t count, bool streamed) {
  static const char zeros[kFrameBlock] = {};
  const char* sources[kWidestPiece];
  for (size_t j = 0; j < leaf.stack; j++) sources[j] = frames[j] ? frames[j] + first * leaf.inner : zeros;
  Weave weave{target, sources, leaf.stack, 1, leaf.inner, count};
  weave_most(&weave, streamed);
  if (!streamed || weave.first > 0) return run(weave);
  char block[kFrameBlock];
  weave.target = block;
  run(weave);
  copy_streamed(target, block, count * weave.width());
}

void take_frame(char* frame, const char* stack, const Observation& leaf, size_t index) {
  if (leaf.inner == 0) return;
  const char* source = stack + index * leaf.inner;
  run(Weave{frame, &source, 1, leaf.stack, leaf.inner, leaf.outer});
}

bool stack_equals(const char* stack, const char* const* frames, const Observation& leaf) {
  if (is_interleaved(leaf)) {
    char block[kFrameBlock];
    const size_t most = pieces_in_block(leaf), piece = leaf.inner * leaf.stack;
    for (size_t first = 0; first < leaf.outer; first += most) {
      const size_t count = std::min(most, leaf.outer - first);
      interleave(block, frames, leaf, first, count, false);
      if (memcmp(block, stack + first * piece, count * piece)) return false;
    }
    return true;
  }
  for (size_t o = 0; o < leaf.outer; o++)
    for (size_t j = 0; j < leaf.stack; j++, stack += leaf.inner)
      if (frames[j] ? memcmp(stack, frames[j] + o * leaf.inner, leaf.inner) : !is_zero(stack, leaf.inner)) return false;
  return true;
}

}  // namespace rlstore
