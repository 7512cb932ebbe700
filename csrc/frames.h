// Frames and stacks of them: a stack is [outer, stack, inner] bytes, a frame [outer, inner]. With the channels first a stack is
// one frame after another (outer 1); with the channels last the frames are interleaved, one pixel of each in turn.
#pragma once

#include <cstddef>

#include "episodes.h"

namespace rlstore {

// Short pieces are interleaved in blocks of up to kFrameBlock bytes, which stay in the nearest cache. Pieces are short if those of
// all frames together have up to kWidestPiece bytes; longer ones are copied one by one.
constexpr size_t kFrameBlock = 4096, kWidestPiece = 512;

inline bool is_interleaved(const Observation& leaf) {
  const size_t width = leaf.inner * leaf.stack;
  return leaf.outer > 1 && width > 0 && width <= kWidestPiece;
}

// How many pieces of each frame are in a block: whole cache lines of them, if they are short.
inline size_t pieces_in_block(const Observation& leaf) {
  const size_t most = kFrameBlock / (leaf.inner * leaf.stack);
  return most > 64 ? most / 64 * 64 : most;
}

// Writes pieces of a stack to `target`: those from `first` on of its frames, `count` of each, at most pieces_in_block(). A null frame is
// zeros. Streamed: with non-temporal stores, which the caller ends (end_streams).
void interleave(char* target, const char* const* frames, const Observation& leaf, size_t first, size_t count, bool streamed);

// Copies the frame at position `index` out of a stack.
void take_frame(char* frame, const char* stack, const Observation& leaf, size_t index);

// True if the stack is made of these frames; null: zeros.
bool stack_equals(const char* stack, const char* const* frames, const Observation& leaf);

}  // namespace rlstore
