#include "frames.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace rlstore {

namespace {

// Frames and a stack, or a part of them: `stack` pieces in turn, from as many sources, in which they are `apart` pieces apart.
struct Weave {
  char* target;
  const char* const* sources;
  size_t stack, apart, inner, count;
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
  for (size_t j = 0; j < Stack; j++) from[j] = reinterpret_cast<const Piece*>(weave.sources[j]);
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
  const auto copy = [&](size_t first, size_t stop, auto size) {
    for (size_t o = first; o < stop; o++)
      for (size_t j = 0; j < stack; j++, target += inner) memcpy(target, sources[j] + o * step, size);
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
      memcpy(weave.target + (o * weave.stack + j) * inner, weave.sources[j] + o * weave.apart * inner, inner);
}

bool is_zero(const char* bytes, size_t count) { return count == 0 || (bytes[0] == 0 && !memcmp(bytes, bytes + 1, count - 1)); }

}  // namespace

void interleave(char* target, const char* const* frames, const Observation& leaf, size_t first, size_t count) {
  static const char zeros[kFrameBlock] = {};
  const char* sources[kWidestPiece];
  for (size_t j = 0; j < leaf.stack; j++) sources[j] = frames[j] ? frames[j] + first * leaf.inner : zeros;
  run(Weave{target, sources, leaf.stack, 1, leaf.inner, count});
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
      interleave(block, frames, leaf, first, count);
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
