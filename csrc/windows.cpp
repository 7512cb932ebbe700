#include "windows.h"

#include <utility>

#include "random.h"
#include "simd.h"

namespace rlstore {

void Windows::push(const Lanes& lanes, int64_t lane, int64_t start, int64_t oldest, std::vector<int64_t>* added) {
  if (start < oldest) return;
  start_at(lanes, lane, tails_[lane]++) = start;
  add_to_counts(lane, 1);
  added->push_back(lanes.row(lane, start));
}

// Closes the open episode, whose last row is the one before `stop`.
void Windows::finish(const Lanes& lanes, int64_t lane, int64_t stop, int64_t oldest, std::vector<int64_t>* added) {
  const int64_t start = open_[lane] - 1, taken = stop - start;
  if (taken < length_)
    push(lanes, lane, start, oldest, added);
  else if ((taken - length_) % stride_ != 0)
    push(lanes, lane, stop - length_, oldest, added);
  open_[lane] = 0;
}

void Windows::take_in(const Lanes& lanes, int64_t lane, int64_t time, std::vector<int64_t>* added, std::vector<int64_t>* dropped) {
  // Relative to everything written, not to this row: a window that this call would drop again must not be added.
  const int64_t stop = time + 1, oldest = lanes.oldest(lane);
  while (heads_[lane] < tails_[lane] && start_at(lanes, lane, heads_[lane]) < oldest) drop_oldest(lanes, lane, dropped);
  if (across_) {
    const int64_t start = stop - length_;
    if (start >= lanes.begun[lane] && (start - lanes.begun[lane]) % stride_ == 0) push(lanes, lane, start, oldest, added);
    return;
  }
  const int64_t slot = lanes.slot_at(lane, lanes.by_rows.remainder(time));
  if (!lanes.has_slot(slot)) return;
  const Episode& episode = lanes.episodes[slot];
  if (episode.start < 0 || episode.start > time) return;  // from a damaged file
  if (open_[lane] && open_[lane] - 1 != episode.start) finish(lanes, lane, time, oldest, added);  // it was closed as broken
  open_[lane] = episode.start + 1;
  const int64_t taken = stop - episode.start;
  if (taken >= length_ && (taken - length_) % stride_ == 0) push(lanes, lane, stop - length_, oldest, added);
  if (episode.stop == stop) finish(lanes, lane, stop, oldest, added);
}

void Windows::follow(const Lanes& lanes, std::vector<int64_t>* added, std::vector<int64_t>* dropped) {
  for (int64_t lane = 0; lane < lanes.lanes; lane++) {
    if (seen_[lane] < lanes.oldest(lane)) begin_anew(lanes, lane, dropped);
    for (; seen_[lane] < lanes.written[lane]; seen_[lane]++) take_in(lanes, lane, seen_[lane], added, dropped);
  }
}

// More rows were written than are held: all known windows are overwritten.
void Windows::begin_anew(const Lanes& lanes, int64_t lane, std::vector<int64_t>* dropped) {
  while (heads_[lane] < tails_[lane]) drop_oldest(lanes, lane, dropped);
  open_[lane] = 0;
  seen_[lane] = lanes.oldest(lane);
}

void Windows::rebuild(const Lanes& lanes) {
  std::vector<int64_t> added, dropped;
  for (int64_t lane = 0; lane < lanes.lanes; lane++) {
    heads_[lane] = tails_[lane] = open_[lane] = 0;
    seen_[lane] = lanes.oldest(lane);
  }
  count_all(lanes);
  follow(lanes, &added, &dropped);
}

void Windows::drop_oldest(const Lanes& lanes, int64_t lane, std::vector<int64_t>* dropped) {
  dropped->push_back(lanes.row(lane, start_at(lanes, lane, heads_[lane]++)));
  add_to_counts(lane, -1);
}

void Windows::add_to_counts(int64_t lane, int64_t windows) {
  total_ += windows;
  for (size_t i = static_cast<size_t>(lane) + 1; i <= counts_.size(); i += i & (~i + 1)) counts_[i - 1] += windows;
}

void Windows::count_all(const Lanes& lanes) {
  counts_.assign(static_cast<size_t>(lanes.lanes), 0);
  total_ = 0;
  for (int64_t lane = 0; lane < lanes.lanes; lane++) add_to_counts(lane, tails_[lane] - heads_[lane]);
}

void Windows::draw(const Lanes& lanes, int64_t* generator, int64_t* rows, size_t count) const {
  const uint64_t seed = static_cast<uint64_t>(generator[0]), counter = static_cast<uint64_t>(generator[1]);
  size_t widest = 1;
  while (widest * 2 <= counts_.size()) widest *= 2;
  std::vector<std::pair<const int64_t*, int64_t>> chosen(count);  // the address of the window's start, and its lane
  for (size_t i = 0; i < count; i++) {
    int64_t left = random_below(seed, counter + i, total_), lane = 0;  // windows before the one drawn, and lanes before its lane
    for (size_t step = widest; step > 0; step /= 2) {
      const size_t next = static_cast<size_t>(lane) + step;
      if (next > counts_.size() || counts_[next - 1] > left) continue;
      left -= counts_[next - 1], lane = static_cast<int64_t>(next);
    }
    chosen[i] = {&start_at(lanes, lane, heads_[lane] + left), lane};
    prefetch_far(chosen[i].first);
  }
  for (size_t i = 0; i < count; i++) rows[i] = lanes.row(chosen[i].second, *chosen[i].first);
  advance(generator, count);
}

bool Windows::contains(const Lanes& lanes, int64_t row) const {
  int64_t lane, time;
  if (!lanes.part(row, &lane, &time)) return false;
  int64_t low = heads_[lane], high = tails_[lane];
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (start_at(lanes, lane, middle) < time)
      low = middle + 1;
    else
      high = middle;
  }
  return low < tails_[lane] && start_at(lanes, lane, low) == time;
}

}  // namespace rlstore
