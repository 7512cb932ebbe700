// Python bindings of priorities and windows, in the memory of tensors that Python owns.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "bindings_replay.h"
#include "random.h"
#include "sumtree.h"
#include "windows.h"

namespace rlstore {

// Windows of a ring; see windows.h.
class WindowIndex {
 public:
  WindowIndex(nb::object ring, int64_t length, int64_t stride, bool across, nb::tuple memory)
      : owner_(ring), memory_(memory), ring_(nb::cast<EpisodeRing*>(ring)), windows_(bind(length, stride, across)) {}

  // Adds the rows written since the last call. The rows of new and of dropped windows are kept until the priorities have them.
  void follow() {
    ring_->require_tables();
    if (!has_priorities_) clear_changes();
    windows_.follow(ring_->lanes(), &added_, &dropped_);
  }
  void rebuild() {
    ring_->require_tables();
    clear_changes();
    windows_.rebuild(ring_->lanes());
  }
  int64_t count() const { return windows_.count(); }
  void draw(nb::handle generator, nb::handle rows) const {
    const size_t count = element_count(describe(rows));
    draw_into(generator, typed<int64_t>(rows, count), count);
  }
  void draw_into(nb::handle generator, int64_t* rows, size_t count) const {
    if (this->count() == 0) throw nb::value_error("draw: there are no windows");
    windows_.draw(ring_->lanes(), typed<int64_t>(generator, 2), rows, count);
  }
  bool contains(int64_t row) const { return windows_.contains(ring_->lanes(), row); }
  void keep_priorities(nb::handle) { has_priorities_ = true; }  // Priorities::follow_windows() sets them here
  int64_t seen(int64_t lane) const { return windows_.seen(lane); }
  const EpisodeRing* ring() const { return ring_; }
  int64_t length() const { return windows_.length(); }
  bool across() const { return windows_.across(); }
  const std::vector<int64_t>& added() const { return added_; }
  const std::vector<int64_t>& dropped() const { return dropped_; }
  void clear_changes() { added_.clear(), dropped_.clear(); }

 private:
  Windows bind(int64_t length, int64_t stride, bool across) {
    const Lanes& lanes = ring_->lanes();
    parts(memory_, 5, "windows: starts, heads, tails, seen, open");
    if (length < 1 || stride < 1 || length >= kCountLimit) throw nb::value_error("windows: lengths of at least 1");
    const size_t count = static_cast<size_t>(lanes.lanes);
    int64_t* starts = typed<int64_t>(memory_[0], count * static_cast<size_t>(lanes.steps));
    int64_t* bound[4];
    for (size_t i = 0; i < 4; i++) bound[i] = typed<int64_t>(memory_[i + 1], count);
    for (size_t lane = 0; lane < count; lane++) {
      const int64_t head = bound[0][lane], tail = bound[1][lane];
      if (head < 0 || tail < head || tail - head > lanes.steps || tail >= kCountLimit || bound[2][lane] < 0 || bound[3][lane] < 0)
        throw nb::value_error("windows: a queue that cannot be");
    }
    Windows windows(length, stride, across, starts, bound[0], bound[1], bound[2], bound[3]);
    windows.count_all(lanes);
    return windows;
  }

  nb::object owner_;
  nb::tuple memory_;
  EpisodeRing* ring_;
  Windows windows_;
  std::vector<int64_t> added_, dropped_;
  bool has_priorities_ = false;
};

// Priorities of the rows of a ring: leaf lane * steps + time % steps holds priority^alpha.
class Priorities {
 public:
  enum Refused : int64_t { kDone = 0, kNotAPriority = 1, kNeverWritten = 2, kNoWindow = 3, kNotRead = 4 };

  // memory: leaves float32, sums float64, maxima float32, seen int64 [lanes].
  Priorities(nb::object ring, nb::tuple memory) : owner_(ring), memory_(memory), ring_(nb::cast<EpisodeRing*>(ring)), tree_(bind()) {}

  static std::vector<size_t> level_sizes(size_t leaves) { return SumTree::level_sizes(leaves); }

  double total() const { return tree_.total(); }
  void rebuild() { tree_.rebuild(); }

  // New rows get the largest priority so far.
  void follow() {
    const Lanes& lanes = ring_->lanes();
    indices_.clear();
    for (int64_t lane = 0; lane < lanes.lanes; lane++)
      for (int64_t time = seen_[lane]; time < lanes.written[lane]; time++) indices_.push_back(leaf_of(lane, time));
    if (indices_.empty()) return;
    const float largest = tree_.maximum();
    set_all(largest > 0 ? largest : 1.0f);
    // Only now: in a mapped file rows that were not seen have no priority yet, should the process be killed.
    for (int64_t lane = 0; lane < lanes.lanes; lane++) seen_[lane] = std::max(seen_[lane], lanes.written[lane]);
  }

  // The newest rows of lanes that have written more than `before` int64 [lanes] get these priorities, float32 [lanes], instead.
  void begin(nb::handle before, nb::handle priorities, double alpha) {
    const Lanes& lanes = ring_->lanes();
    const int64_t* counts = typed<int64_t>(before, static_cast<size_t>(lanes.lanes));
    const float* given = typed<float>(priorities, static_cast<size_t>(lanes.lanes));
    indices_.clear(), values_.clear();
    for (int64_t lane = 0; lane < lanes.lanes; lane++) {
      if (lanes.written[lane] <= counts[lane]) continue;
      if (!(given[lane] >= 0.0f && given[lane] <= FLT_MAX)) throw nb::value_error("begin: not a priority");
      indices_.push_back(leaf_of(lane, lanes.written[lane] - 1));
      values_.push_back(raised(given[lane], static_cast<float>(alpha)));
    }
    tree_.set(indices_.data(), values_.data(), indices_.size());
  }

  // Only rows at which a window begins have a priority; see WindowIndex::follow.
  void follow_windows(WindowIndex& windows) {
    if (windows.ring() != ring_) throw nb::value_error("follow_windows: the windows of another ring");
    const float largest = tree_.maximum();
    set_rows(windows.dropped(), 0.0f);
    std::vector<int64_t> added;  // a call that was interrupted may have left some that were dropped since
    for (int64_t row : windows.added())
      if (windows.contains(row)) added.push_back(row);
    set_rows(added, largest > 0 ? largest : 1.0f);
    windows.clear_changes();
    for (int64_t lane = 0; lane < ring_->lanes().lanes; lane++) seen_[lane] = windows.seen(lane);
  }

  // Draws one row from each of `rows` equal parts of the total, with its weight (P(i) * size)^-beta / the largest weight.
  // Returns false, and draws nothing, if every priority is 0.
  bool draw(nb::handle generator, double beta, nb::handle rows, nb::handle weights) {
    const size_t count = element_count(describe(rows));
    return draw_into(generator, beta, typed<int64_t>(rows, count), typed<float>(weights, count), count);
  }

  bool draw_into(nb::handle generator, double beta, int64_t* rows, float* weights, size_t count) {
    int64_t* state = typed<int64_t>(generator, 2);
    const double total = tree_.total();
    if (!(total > 0)) return false;
    targets_.resize(count);
    for (size_t i = 0; i < count; i++) {
      const double unit = random_unit(static_cast<uint64_t>(state[0]), static_cast<uint64_t>(state[1]) + i);
      targets_[i] = (static_cast<double>(i) + unit) / static_cast<double>(count) * total;
    }
    advance(state, count);
    tree_.find(targets_.data(), rows, count);
    weigh(rows, weights, count, static_cast<float>(beta));
    for (size_t i = 0; i < count; i++) rows[i] = row_of(rows[i]);
    return true;
  }

  const EpisodeRing* ring() const { return ring_; }

  // The CUDA version defers this work; here follow() sets initial priorities immediately.
  void settle() const {}
  // The rows that update() has dropped: counted with what it sets, so that nothing comes between the two.
  int64_t dropped() const { return stale_; }

  // Sets all priorities, or none if one is refused. Returns (error, its index, number of stale rows dropped). Rows that are not
  // int64 [n], and priorities that are not floats [n] or [n, 1], are not read: they must be converted first.
  std::tuple<int64_t, int64_t, int64_t> update(nb::handle rows_given, nb::handle priorities_given, double alpha, WindowIndex* windows) {
    Given rows, priorities;
    const DLDataType real{kFloat, 32, 1}, exact{kFloat, 64, 1};
    // First the priorities: to read floats may run code of the caller's, to read whole numbers does not.
    if (!read_plain(priorities_given, &priorities) || priorities.ndim < 1 || priorities.ndim > 2) return {kNotRead, 0, 0};
    if (!read_plain(rows_given, &rows) || rows.ndim != 1 || !(rows.dtype == DLDataType{kInt, 64, 1})) return {kNotRead, 0, 0};
    if (priorities.shape[0] != rows.shape[0] || (priorities.ndim == 2 && priorities.shape[1] != 1)) return {kNotRead, 0, 0};
    if (!(priorities.dtype == real) && !(priorities.dtype == exact)) return {kNotRead, 0, 0};
    return set(reinterpret_cast<const int64_t*>(rows.memory), priorities, rows.count(), static_cast<float>(alpha), windows);
  }

 private:
  SumTree bind() {
    parts(memory_, 4, "priorities: leaves, sums, maxima, seen");
    const Lanes& lanes = ring_->lanes();
    const size_t rows = static_cast<size_t>(lanes.lanes * lanes.steps);
    const size_t count = (rows + SumTree::kWidth - 1) / SumTree::kWidth * SumTree::kWidth;
    size_t above = 0;
    for (size_t size : SumTree::level_sizes(count)) above += size;
    seen_ = typed<int64_t>(memory_[3], static_cast<size_t>(lanes.lanes));
    for (int64_t lane = 0; lane < lanes.lanes; lane++)
      if (seen_[lane] < 0) throw nb::value_error("priorities: rows were seen that cannot be");
    const float* leaves = typed<float>(memory_[0], count);
    for (size_t leaf = rows; leaf < count; leaf++)
      if (leaves[leaf] != 0) throw nb::value_error("priorities: a leaf beyond the last row");
    SumTree tree(typed<float>(memory_[0], count), count, typed<double>(memory_[1], above), typed<float>(memory_[2], above));
    tree.rebuild();  // the sums must match the leaves
    return tree;
  }

  static bool read_plain(nb::handle value, Given* given) {
    if (Py_TYPE(value.ptr()) == numpy.array) return read_array(value.ptr(), given);
    return Py_TYPE(value.ptr()) == tensor_type && read_tensor(value.ptr(), given) && !given->strides;
  }

  std::tuple<int64_t, int64_t, int64_t> set(const int64_t* rows, const Given& priorities, size_t count, float alpha, WindowIndex* windows) {
    const Lanes& lanes = ring_->lanes();
    indices_.resize(count), values_.resize(count);
    size_t held = 0;
    for (size_t i = 0; i < count; i++) {
      const float priority = priority_at(priorities, i);
      if (!(priority >= 0.0f && priority <= FLT_MAX)) return {kNotAPriority, i, 0};
      int64_t lane, time;
      if (!lanes.part(rows[i], &lane, &time) || time >= lanes.written[lane]) return {kNeverWritten, i, 0};
      if (time < lanes.oldest(lane)) continue;
      if (windows && !windows->contains(rows[i])) return {kNoWindow, i, 0};
      indices_[held] = leaf_of(lane, time);
      tree_.prefetch(indices_[held]);
      values_[held++] = raised(priority, alpha);
    }
    tree_.set(indices_.data(), values_.data(), held);
    stale_ += static_cast<int64_t>(count - held);
    return {kDone, 0, static_cast<int64_t>(count - held)};
  }

  // What is above 0 stays so, though a float cannot tell.
  static float priority_at(const Given& priorities, size_t i) {
    if (priorities.dtype.bits == 32) return reinterpret_cast<const float*>(priorities.memory)[i];
    const double given = reinterpret_cast<const double*>(priorities.memory)[i];
    return given > 0 ? std::max(static_cast<float>(given), FLT_MIN) : static_cast<float>(given);
  }

  // A priority above 0 stays above 0 after rounding.
  static float raised(float priority, float alpha) {
    return priority > 0 ? std::max(std::pow(priority, alpha), FLT_MIN) : alpha == 0.0f ? 1.0f : 0.0f;
  }

  int64_t leaf_of(int64_t lane, int64_t time) const { return lane * ring_->lanes().steps + ring_->lanes().by_steps.remainder(time); }

  int64_t row_of(int64_t leaf) const {
    const Lanes& lanes = ring_->lanes();
    int64_t lane;
    const int64_t place = lanes.by_steps.remainder(leaf, &lane);
    const int64_t newest = lanes.written[lane] - 1, newest_place = lanes.by_steps.remainder(newest);
    const int64_t back = newest_place >= place ? newest_place - place : newest_place - place + lanes.steps;
    return (newest - back) * lanes.lanes + lane;
  }

  void weigh(const int64_t* leaves, float* weights, size_t count, float beta) const {
    float least = FLT_MAX;
    for (size_t i = 0; i < count; i++) {
      weights[i] = tree_.leaf(leaves[i]);
      least = std::min(least, weights[i]);
    }
    for (size_t i = 0; i < count; i++) weights[i] = std::pow(weights[i] / least, -beta);
  }

  void set_all(float value) {
    values_.assign(indices_.size(), value);
    tree_.set(indices_.data(), values_.data(), indices_.size());
  }

  void set_rows(const std::vector<int64_t>& rows, float value) {
    indices_.clear();
    for (int64_t row : rows) {
      int64_t lane, time;
      if (ring_->lanes().part(row, &lane, &time)) indices_.push_back(leaf_of(lane, time));  // else from a damaged file
    }
    set_all(value);
  }

  nb::object owner_;
  nb::tuple memory_;
  EpisodeRing* ring_;
  int64_t* seen_ = nullptr;  // bound with the tree
  int64_t stale_ = 0;
  SumTree tree_;
  std::vector<int64_t> indices_;
  std::vector<float> values_;
  std::vector<double> targets_;
};

}  // namespace rlstore
