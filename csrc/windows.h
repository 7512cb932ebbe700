// An index of the windows of a fixed length: for each lane, a queue of the rows at which they begin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "episodes.h"

namespace rlstore {

// Windows of `length` rows that begin every `stride` rows of an episode (or, with `across`, of a lane). A finished episode
// has one more window that ends with it, if none does; an episode shorter than a window has a single, shorter one.
// Both ends of a queue only move forward, so adding, dropping and drawing take constant time.
class Windows {
 public:
  // starts: [lanes, steps] times; heads, tails, seen, open: [lanes]. Zero memory is an empty index.
  Windows(int64_t length, int64_t stride, bool across, int64_t* starts, int64_t* heads, int64_t* tails, int64_t* seen, int64_t* open)
      : length_(length), stride_(stride), across_(across), starts_(starts), heads_(heads), tails_(tails), seen_(seen), open_(open) {}

  // Counts the windows that are in the memory; before anything else, and once more after the memory was changed from outside.
  void count_all(const Lanes& lanes);

  // Adds the rows written since the last call; returns the rows of new windows and of dropped ones.
  void follow(const Lanes& lanes, std::vector<int64_t>* added, std::vector<int64_t>* dropped);
  // Rebuilds the index from all rows that are held.
  void rebuild(const Lanes& lanes);
  int64_t count() const { return total_; }
  void draw(const Lanes& lanes, int64_t* generator, int64_t* rows, size_t count) const;
  bool contains(const Lanes& lanes, int64_t row) const;
  int64_t length() const { return length_; }
  bool across() const { return across_; }
  // Rows of a lane that were taken in.
  int64_t seen(int64_t lane) const { return seen_[lane]; }

 private:
  void begin_anew(const Lanes& lanes, int64_t lane, std::vector<int64_t>* dropped);
  void take_in(const Lanes& lanes, int64_t lane, int64_t time, std::vector<int64_t>* added, std::vector<int64_t>* dropped);
  void push(const Lanes& lanes, int64_t lane, int64_t start, int64_t oldest, std::vector<int64_t>* added);
  void drop_oldest(const Lanes& lanes, int64_t lane, std::vector<int64_t>* dropped);
  void add_to_counts(int64_t lane, int64_t windows);
  void finish(const Lanes& lanes, int64_t lane, int64_t stop, int64_t oldest, std::vector<int64_t>* added);
  int64_t& start_at(const Lanes& lanes, int64_t lane, int64_t index) const {
    return starts_[lane * lanes.steps + lanes.by_steps.remainder(index)];
  }

  int64_t length_, stride_;
  bool across_;
  int64_t *starts_, *heads_, *tails_, *seen_;
  int64_t* open_;  // one more than the start of the newest row's episode; 0: it has ended
  // The number of windows of lanes, as a binary indexed tree (Fenwick 1994): a draw finds its lane in a few steps, however many
  // lanes there are. Entry i - 1 is the sum of the lanes from i - (the lowest bit of i) to before i.
  std::vector<int64_t> counts_;
  int64_t total_ = 0;
};

}  // namespace rlstore
