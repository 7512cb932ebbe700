// Python bindings of the ring of episodes: pointers into tensors that Python owns, bound once.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "bindings_guard.h"
#include "bindings_rules.h"
#include "bindings_tensor.h"
#include "bindings_values.h"
#include "bindings_writer.h"
#include "episodes.h"
#include "replay.h"
#include "restore.h"

namespace rlstore {

// The items of a tuple that must have `count` items: nanobind does not check the index.
inline nb::tuple parts(nb::handle object, size_t count, const char* message) {
  nb::tuple tuple = nb::cast<nb::tuple>(object);
  if (tuple.size() != count) throw nb::value_error(message);
  return tuple;
}

// A view [lanes, rows, ...] in which each row is contiguous.
inline Block bind_block(nb::handle object, int64_t* lanes, int64_t* rows) {
  const DLTensor view = describe_strided(object);
  if (view.ndim < 2) throw nb::value_error("a block is [lanes, rows, ...]");
  *lanes = view.shape[0], *rows = view.shape[1];
  DLTensor row = view;
  row.ndim -= 2, row.shape += 2, row.strides += 2;
  if (!is_contiguous(row)) throw nb::value_error("the rows of a block are contiguous");
  const size_t item = element_bytes(view);
  if (view.dtype.lanes != 1 || view.dtype.bits % 8) throw nb::value_error("a block holds elements of whole bytes");
  return Block{address(view), static_cast<size_t>(view.strides[0]) * item, static_cast<size_t>(view.strides[1]) * item,
               element_count(view, 2) * item, view.dtype};
}

inline std::vector<int64_t> bind_shape(nb::handle object) {
  std::vector<int64_t> shape;
  for (nb::handle size : object) {
    shape.push_back(nb::cast<int64_t>(size));
    if (shape.back() < 0 || shape.back() >= kCountLimit) throw nb::value_error("a shape has a size that cannot be");
  }
  return shape;
}

// True if `bytes` is the size of this many elements of this dtype.
inline bool fills(const std::vector<int64_t>& shape, const DLDataType& dtype, size_t bytes) {
  size_t count = dtype.bits / 8;
  for (int64_t size : shape)
    if (__builtin_mul_overflow(count, static_cast<size_t>(size), &count)) return false;
  return count == bytes;
}

class EpisodeRing {
 public:
  // Return values of write(), besides the index of a value that does not fit.
  enum Outcome : int64_t { kDone = -1, kNeedSlots = -2, kNeedStarts = -3, kDoneWithBreak = -4, kBusy = -5, kNeedRoom = -6, kDoneWithRepeat = -7 };

  // counters: written, begun, current, after_end, free_count, each int64 [lanes]. leaves: (block, shape, stack, outer) for
  // each leaf of the observations, with the shape of a whole stack. columns: (block, shape), `reward` is the index of the
  // rewards. first: the index of this ring's first lane among the lanes of the tables. rules: by the index of a column that
  // may not hold every value, its bounds; see Rule.
  EpisodeRing(int64_t steps, nb::tuple counters, nb::object episode_of, nb::tuple leaves, nb::tuple columns, size_t reward, int resets,
              int64_t first, nb::dict rules)
      : reward_(reward), resets_(static_cast<ResetSteps>(resets)), first_(first) {
    const Block slot_block = bind_block(episode_of, &lanes_.lanes, &lanes_.rows);
    if (!(slot_block.dtype == DLDataType{kInt, 32, 1}) || slot_block.bytes != 4) throw nb::value_error("episode_of is int32 [lanes, rows]");
    if (resets < 0 || resets > 3) throw nb::value_error("resets is 0, 1, 2 or 3");
    if (steps < 1 || lanes_.lanes < 1 || lanes_.rows >= kCountLimit / lanes_.lanes) throw nb::value_error("a ring has lanes and steps");
    lanes_.steps = steps;
    lanes_.by_lanes = Divider(lanes_.lanes), lanes_.by_rows = Divider(lanes_.rows), lanes_.by_steps = Divider(steps);
    lanes_.episode_of = slot_block.base, lanes_.lane_stride = slot_block.lane_stride, lanes_.row_stride = slot_block.row_stride;
    int64_t** bound[] = {&lanes_.written, &lanes_.begun, &lanes_.current, &lanes_.after_end, &lanes_.free_count};
    if (counters.size() != 5) throw nb::value_error("five counters");
    for (size_t i = 0; i < 5; i++) *bound[i] = typed<int64_t>(counters[i], static_cast<size_t>(lanes_.lanes));
    for (nb::handle item : leaves) bind_leaf(parts(item, 4, "a leaf is (block, shape, stack, outer)"));
    if (leaves_.empty()) throw nb::value_error("observations have a leaf");
    lanes_.kept = lanes_.rows;
    for (const Observation& leaf : leaves_) lanes_.kept = std::min(lanes_.kept, lanes_.rows - static_cast<int64_t>(leaf.stack));
    for (nb::handle item : columns) {
      nb::tuple column = parts(item, 2, "a column is (block, shape)");
      columns_.push_back(bind_lanes(column[0]));
      column_shapes_.push_back(bind_shape(column[1]));
      if (!fills(column_shapes_.back(), columns_.back().dtype, columns_.back().bytes)) throw nb::value_error("a column's shape is not its block's");
    }
    if (reward >= columns_.size() || !(columns_[reward].dtype == DLDataType{kFloat, 32, 1})) throw nb::value_error("rewards are float32");
    for (auto [index, bounds] : rules) {
      const size_t column = nb::cast<size_t>(index);
      if (column >= columns_.size()) throw nb::value_error("a rule for no column");
      const DLDataType dtype = columns_[column].dtype;
      rules_.emplace_back(column, dtype, nb::cast<nb::sequence>(bounds), columns_[column].bytes * 8 / dtype.bits);
    }
    moves_.resize(static_cast<size_t>(lanes_.lanes));
    givens_ = std::vector<Given>(leaves_.size() * 3 + columns_.size());
    kept_ = nb::make_tuple(counters, episode_of, leaves, columns);
  }

  EpisodeRing(const EpisodeRing&) = delete;

  // The tables that grow: episodes int64 [episodes, 4], free episode indices int32 [episodes / lanes, lanes] of all lanes of
  // the tables, finals and (or None) starts of each leaf.
  void set_tables(nb::object episodes, nb::object free_slots, nb::tuple finals, nb::tuple starts) {
    const DLTensor described = describe(episodes);
    if (described.ndim != 2 || described.shape[1] != 4) throw nb::value_error("episodes are int64 [slots, 4]");
    const size_t slots = static_cast<size_t>(described.shape[0]);
    const DLTensor stacks = describe(free_slots);
    if (slots == 0 || stacks.ndim != 2 || stacks.shape[1] < 1 || slots % static_cast<size_t>(stacks.shape[1]))
      throw nb::value_error("every lane has as many slots");
    if (first_ < 0 || first_ > stacks.shape[1] - lanes_.lanes) throw nb::value_error("lanes that the tables do not serve");
    if (finals.size() != leaves_.size() || starts.size() != leaves_.size()) throw nb::value_error("tables for every leaf");
    Lanes lanes = lanes_;
    std::vector<Observation> leaves = leaves_;
    lanes.slots = static_cast<int64_t>(slots);
    lanes.episodes = reinterpret_cast<Episode*>(typed<int64_t>(episodes, slots * 4));
    lanes.free_slots = typed<int32_t>(free_slots, slots) + first_;
    lanes.table_lanes = stacks.shape[1];
    for (size_t k = 0; k < leaves.size(); k++) {
      Observation& leaf = leaves[k];
      leaf.finals = table(finals[k], slots * leaf.frame_bytes());
      leaf.starts = starts[k].is_none() ? nullptr : table(starts[k], slots * (leaf.stack - 1) * leaf.frame_bytes());
    }
    lanes_ = lanes, leaves_ = leaves;  // only after all were checked
    tables_ = nb::make_tuple(episodes, free_slots, finals, starts);
  }

  // values: observation leaves, next observation leaves, columns, terminated, truncated, mask, final observation leaves, and
  // where those are given; the last three groups may be None. With a single leaf final observations may be a list of them, None
  // for lanes that have none. Returns kDone, kDoneWithBreak (a broken episode was closed) or kDoneWithRepeat (see repeated()); or, with
  // nothing written, the index of the first value that must be converted or refused, or what is needed first.
  int64_t write(nb::tuple values) {
    const Writing writing(this);
    const int64_t misfit = find_values(values, 0);
    return misfit >= 0 ? misfit : write_found(0);
  }

  // Writes the steps from `begin` to before `end` of values that are those of `steps` steps: [steps, lanes, ...]. All values are
  // checked before anything is written. `resumed`: none is a reset step, and the first need not continue what is held. Returns the
  // first step that was not written, and what write() returns: of a break or else a repeat in any step, or if none was written why not.
  std::tuple<int64_t, int64_t> write_steps(nb::tuple values, int64_t steps, int64_t begin, int64_t end, bool resumed, bool /*checked*/) {
    if (steps < 1 || begin < 0 || begin > end || end > steps || steps >= kCountLimit / lanes_.lanes) throw nb::value_error("there are no such steps");
    const Writing writing(this);
    const int64_t misfit = find_values(values, static_cast<size_t>(steps));
    if (misfit >= 0) return {begin, misfit};
    int64_t outcome = kDone;
    for (int64_t step = begin; step < end;) {
      for (int64_t lane = 0; resumed && lane < lanes_.lanes; lane++)
        if (!has_mask_ || mask_.at[step * lanes_.lanes + lane]) lanes_.after_end[lane] = step ? -1 : kResumed;
      const int64_t written = write_found(static_cast<size_t>(step));
      if (!is_done(written)) return {step, step > begin ? outcome : written};
      if (outcome != kDoneWithBreak && written != kDone) outcome = written;
      step++;
      if (lanes_.lanes == 1) step += write_run(step, end);
    }
    return {end, outcome};
  }

  // So many steps may be written before write() returns kNeedRoom; none until this is called.
  void allow(int64_t steps) {
    if (steps < 0) throw nb::value_error("no fewer steps than none may be written");
    room_ = steps;
  }

  // Lets append() write. `follow` adds the rows written since to what is derived from them.
  void guard_with(nb::object guard, std::function<void()> follow) {
    guard_ = nb::cast<Guard*>(guard), guard_owner_ = guard, follow_ = std::move(follow);
  }

  // write() with what follows from it, in one step as other threads see it: all of it happens with the GIL held. Returns
  // kBusy, with nothing written, if the guard is not free or no step may be written.
  int64_t append(nb::tuple values) {
    if (!guard_ || !guard_->is_free() || room_ == 0) return kBusy;
    guard_->enter();
    const Exit exit{guard_};
    const int64_t outcome = write(values);
    if (is_done(outcome)) follow_();
    return outcome;
  }

  // append() for a caller that has the guard and has made sure that nobody reads; it returns what write() does.
  int64_t write_held(nb::tuple values) {
    const int64_t outcome = write(values);
    if (is_done(outcome)) follow_();
    return outcome;
  }

  // The largest row of the last kDoneWithRepeat, -1 before any: it repeats the final observation of the episode before, without a flag, and
  // was not taken to be a reset step.
  int64_t repeated() const { return repeated_; }

  // Other processes write: `written` int64 [lanes] is their count; the count of this ring is what it has observed so far.
  void watch(nb::object written) {
    lanes_.written_now = typed<int64_t>(written, static_cast<size_t>(lanes_.lanes));
    watched_ = written;
  }

  // Observes the rows that other processes have written; does nothing if watch() was never called.
  void catch_up() {
    if (!lanes_.written_now) return;
    for (int64_t lane = 0; lane < lanes_.lanes; lane++)
      lanes_.written[lane] = __atomic_load_n(lanes_.written_now + lane, __ATOMIC_ACQUIRE);
  }

  // Flags, uint8 [lanes]: lanes in which rows that this ring still counts as held may have been overwritten.
  bool overrun(nb::handle flags) const {
    uint8_t* out = typed<uint8_t>(flags, static_cast<size_t>(lanes_.lanes));
    bool any = false;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (int64_t lane = 0; lane < lanes_.lanes; lane++) {
      const bool is_empty = lanes_.written[lane] == lanes_.begun[lane];
      out[lane] = lanes_.written_now && !is_empty && !lanes_.is_intact(lane, lanes_.oldest(lane));
      any = any || out[lane];
    }
    return any;
  }

  const Lanes& lanes() const { return lanes_; }
  const std::vector<Observation>& leaves() const { return leaves_; }
  const std::vector<Block>& columns() const { return columns_; }
  size_t reward() const { return reward_; }

  void draw(nb::handle generator, nb::handle rows) const {
    const size_t count = element_count(describe(rows));
    draw_into(generator, typed<int64_t>(rows, count), count);
  }

  void draw_into(nb::handle generator, int64_t* rows, size_t count) const {
    if (!counts_can_be(lanes_)) throw nb::value_error(kNoCount);
    if (!draw_rows(lanes_, typed<int64_t>(generator, 2), rows, count)) throw nb::value_error("draw: there are no rows");
  }

  void bounds(nb::handle rows, nb::handle first, nb::handle stop) const {
    const size_t count = element_count(describe(rows));
    const int64_t* ids = held_rows(rows, count);
    episode_bounds(lanes_, ids, count, typed<int64_t>(first, count), typed<int64_t>(stop, count));
  }

  void windows(nb::handle starts, size_t length, bool across, nb::handle rows) const {
    const size_t count = element_count(describe(starts));
    if (length >= static_cast<size_t>(kCountLimit)) throw nb::value_error("a window is shorter");
    expand(typed<int64_t>(starts, count), count, length, across, typed<int64_t>(rows, product(count, length)));
  }

  void expand(const int64_t* starts, size_t count, size_t length, bool across, int64_t* rows) const {
    require_tables();
    if (!expand_windows(lanes_, starts, count, length, across, rows)) throw nb::index_error("a row is not held");
  }

  const int64_t* held_rows(nb::handle rows, size_t count) const {
    const int64_t* ids = typed<int64_t>(rows, count);
    require_tables();
    if (!rows_are_held(lanes_, ids, count)) throw nb::index_error("a row is not held");
    return ids;
  }

  void require_tables() const {
    if (!lanes_.slots) throw nb::value_error("the ring has no tables yet");
  }

 private:
  // Flags as bytes: those of the caller, or converted ones. They are true if they are not 0.
  struct Flags {
    Given given;
    std::vector<uint8_t> bytes;
    const uint8_t* at = nullptr;
    uint8_t* make(size_t count) {
      bytes.resize(std::max(bytes.size(), count));
      at = bytes.data();
      return bytes.data();
    }
  };

  // Finds the memory of all values of so many steps, or (0) of a step without an axis for steps; returns -1, or the index of the
  // first value that must be converted or refused.
  int64_t find_values(nb::tuple values, size_t steps) {
    const size_t leaves = leaves_.size(), columns = columns_.size(), flags = leaves * 2 + columns;
    const size_t lanes = moves_.size() * std::max<size_t>(steps, 1);
    steps_ = static_cast<int64_t>(steps);
    if (values.size() != flags + 4 + leaves) throw nb::value_error("a step has a value for each field");
    check_counters();
    PyObject* tuple = values.ptr();
    const auto value = [&](size_t i) { return PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(i)); };
    for (size_t i = 0; i < flags; i++) {
      const std::vector<int64_t>& shape = i < leaves * 2 ? leaf_shapes_[i % leaves] : column_shapes_[i - leaves * 2];
      const DLDataType dtype = i < leaves * 2 ? leaves_[i % leaves].block.dtype : columns_[i - leaves * 2].dtype;
      if (!find(value(i), shape, dtype, &givens_[i])) return static_cast<int64_t>(i);
    }
    if (!find_flags(value(flags), lanes, &terminated_)) return static_cast<int64_t>(flags);
    if (!find_flags(value(flags + 1), lanes, &truncated_)) return static_cast<int64_t>(flags + 1);
    has_mask_ = value(flags + 2) != Py_None;
    if (has_mask_ && !find_flags(value(flags + 2), lanes, &mask_)) return static_cast<int64_t>(flags + 2);
    PyObject* where = value(flags + 3 + leaves);
    has_finals_ = value(flags + 3) != Py_None, some_final_ = where != Py_None;
    if (some_final_ && !find_flags(where, lanes, &has_final_)) return static_cast<int64_t>(flags + 3 + leaves);
    for (size_t k = 0; has_finals_ && k < leaves; k++) {
      PyObject* final = value(flags + 3 + k);
      if (leaves == 1 && steps == 0 && !some_final_ && find_listed_finals(final)) break;
      if (!find(final, leaf_shapes_[k], leaves_[k].block.dtype, &givens_[flags + k])) return static_cast<int64_t>(flags + 3 + k);
    }
    for (const Rule& rule : rules_)
      if (!obeys(rule, lanes)) return static_cast<int64_t>(leaves * 2 + rule.field);
    return -1;
  }

  // Writes one of the steps that were found.
  int64_t write_found(size_t number) {
    fill_step(number);
    switch (plan_step(lanes_, leaves_, step_, resets_, moves_.data())) {
      case Need::kSlots: return kNeedSlots;
      case Need::kStarts: return kNeedStarts;
      case Need::kNothing: break;
    }
    if (room_ == 0) return kNeedRoom;
    room_--;
    const Told told = write_step(lanes_, leaves_, columns_, step_, resets_, moves_.data());
    if (told.has_broken) return kDoneWithBreak;
    if (told.repeat < 0) return kDone;
    repeated_ = told.repeat;
    return kDoneWithRepeat;
  }

  static bool is_done(int64_t outcome) { return outcome == kDone || outcome == kDoneWithBreak || outcome == kDoneWithRepeat; }

  // Writes the steps from `begin` on that continue the episode of the single lane, as far as they may be written at once; returns
  // how many.
  int64_t write_run(int64_t begin, int64_t end) {
    constexpr size_t kTogether = 128 << 10;  // bytes that are compared and then copied while they are in the cache
    size_t bytes = 1;
    for (const Observation& leaf : leaves_) bytes += leaf.frame_bytes();
    const int64_t most = std::min({end - begin, room_, static_cast<int64_t>(kTogether / bytes) + 1});
    if (most <= 0 || lanes_.current[0] < 0) return 0;
    fill_step(static_cast<size_t>(begin));
    const int64_t count = count_continuing(lanes_, leaves_, step_, most);
    if (count > 0) write_continuing(lanes_, leaves_, columns_, step_, count);
    room_ -= count;
    return count;
  }

  void check_counts(int64_t lane) const {
    if (lanes_.begun[lane] < 0 || lanes_.written[lane] < lanes_.begun[lane] || lanes_.written[lane] >= kCountLimit)
      throw nb::value_error(kNoCount);
  }

  // Checks the table indices that a write uses, which are in the caller's memory.
  void check_counters() const {
    require_tables();
    const int64_t deep = lanes_.slots / lanes_.table_lanes;
    for (int64_t lane = 0; lane < lanes_.lanes; lane++) {
      check_counts(lane);
      const int64_t free = lanes_.free_count[lane], current = lanes_.current[lane], ended = lanes_.after_end[lane];
      const bool known = current < lanes_.slots && ended < lanes_.slots && free >= 0 && free <= deep;
      if (!known || (free > 0 && !lanes_.has_slot(lanes_.free_slot(lane, free - 1))))
        throw nb::value_error("the counters of a lane do not fit its tables");
    }
  }

  // A block with the lanes and rows of the ring.
  Block bind_lanes(nb::handle object) const {
    int64_t lanes, rows;
    const Block block = bind_block(object, &lanes, &rows);
    if (lanes != lanes_.lanes || rows != lanes_.rows) throw nb::value_error("every block has the ring's lanes and rows");
    return block;
  }

  static char* table(nb::handle object, size_t bytes) {
    DLTensor tensor = describe(object);
    if (element_count(tensor) * element_bytes(tensor) != bytes) throw nb::value_error("a table does not fit its leaf");
    return address(tensor);
  }

  void bind_leaf(nb::tuple item) {
    Observation leaf;
    leaf.block = bind_lanes(item[0]);
    leaf.stack = nb::cast<size_t>(item[2]), leaf.outer = nb::cast<size_t>(item[3]);
    if (leaf.outer < 1 || leaf.frame_bytes() % leaf.outer) throw nb::value_error("a frame falls into `outer` pieces");
    // In addition to the steps: the next observation of the newest row, and the older frames of the oldest row's stack.
    if (leaf.stack < 1 || leaf.stack > static_cast<size_t>(lanes_.rows) || lanes_.rows - static_cast<int64_t>(leaf.stack) < lanes_.steps)
      throw nb::value_error("a ring has at least steps + stack rows");
    leaf.inner = leaf.frame_bytes() / leaf.outer;
    leaves_.push_back(leaf);
    leaf_shapes_.push_back(bind_shape(item[1]));
    if (!fills(leaf_shapes_.back(), leaf.block.dtype, leaf.stack_bytes())) throw nb::value_error("a leaf's shape is a stack of frames");
  }

  bool fits_step(const Given& given, const std::vector<int64_t>& shape) const {
    return steps_ ? has_steps(given, steps_, lanes_.lanes, shape) : has_shape(given, lanes_.lanes, shape);
  }

  bool find(PyObject* value, const std::vector<int64_t>& shape, DLDataType dtype, Given* given) {
    return read_value(value, given) && !given->strides && fits_step(*given, shape) && given->become(dtype);
  }

  // Flags of one byte are read where they are.
  bool find_flags(PyObject* value, size_t lanes, Flags* flags) {
    static const std::vector<int64_t> scalar;
    Given& given = flags->given;
    if (!read_value(value, &given) || given.strides || !can_be_flag(given.dtype) || !fits_step(given, scalar)) return false;
    if (given.dtype.bits == 8) {
      flags->at = reinterpret_cast<const uint8_t*>(given.memory);
      return true;
    }
    if (!is_nan_free(given.memory, given.dtype, lanes)) return false;
    write_flags(flags->make(lanes), given.memory, given.dtype, lanes);
    return true;
  }

  // Reads a list of final observations, as vector environments give it: None for lanes without one. False if it is none.
  bool find_listed_finals(PyObject* value) {
    const size_t lanes = moves_.size(), bytes = leaves_[0].stack_bytes();
    Given &list = list_, &finals = givens_.back();
    list.release();
    if (!read_objects(value, lanes, &list)) return false;
    finals.copy.resize(std::max(finals.copy.size(), lanes * bytes));
    uint8_t* has_final = has_final_.make(lanes);
    for (size_t lane = 0; lane < lanes; lane++) {
      const nb::object entry = object_at(value, lane, list);
      has_final[lane] = 0;
      if (entry.is_none()) continue;
      if (!entry.is_valid() || !read_value(entry.ptr(), &entry_) || entry_.strides || !has_shape(entry_, 1, leaf_shapes_[0]) ||
          !entry_.become(leaves_[0].block.dtype))
        return false;
      memcpy(finals.copy.data() + lane * bytes, entry_.memory, bytes);
      has_final[lane] = 1;
    }
    finals.memory = finals.copy.data(), some_final_ = true;
    return true;
  }

  // Lanes that take no part may break the rule.
  bool obeys(const Rule& rule, size_t lanes) const {
    const char* memory = givens_[leaves_.size() * 2 + rule.field].memory;
    if (rule.holds(memory, lanes)) return true;
    if (!has_mask_) return false;
    for (size_t lane = 0; lane < lanes; lane++)
      if (mask_.at[lane] && !rule.holds(memory + lane * columns_[rule.field].bytes, 1)) return false;
    return true;
  }

  void fill_step(size_t number) {
    const size_t leaves = leaves_.size(), first = number * moves_.size();
    step_.observations.resize(leaves), step_.next_observations.resize(leaves), step_.columns.resize(columns_.size());
    step_.finals.resize(has_finals_ ? leaves : 0);
    for (size_t k = 0; k < leaves; k++) {
      const size_t offset = first * leaves_[k].stack_bytes();
      step_.observations[k] = givens_[k].memory + offset, step_.next_observations[k] = givens_[leaves + k].memory + offset;
      if (has_finals_) step_.finals[k] = givens_[leaves * 2 + columns_.size() + k].memory + offset;
    }
    for (size_t k = 0; k < columns_.size(); k++) step_.columns[k] = givens_[leaves * 2 + k].memory + first * columns_[k].bytes;
    step_.terminated = terminated_.at + first, step_.truncated = truncated_.at + first;
    step_.mask = has_mask_ ? mask_.at + first : nullptr, step_.has_final = some_final_ ? has_final_.at + first : nullptr;
    step_.rewards = reinterpret_cast<const float*>(step_.columns[reward_]);
    step_.reward_width = columns_[reward_].bytes / sizeof(float);
  }

  // Reading a value may run code of the caller's, which may come here again.
  struct Writing {
    EpisodeRing* ring;
    explicit Writing(EpisodeRing* ring) : ring(ring) {
      if (ring->writing_) throw std::runtime_error("a step is written while another one is");
      ring->writing_ = true;
    }
    ~Writing() {
      for (Given& given : ring->givens_) given.release(), given.shrink();
      for (Flags* flags : {&ring->terminated_, &ring->truncated_, &ring->mask_, &ring->has_final_}) flags->given.release(), flags->given.shrink();
      ring->list_.release(), ring->entry_.release();
      ring->writing_ = false;
    }
  };
  struct Exit {
    Guard* guard;
    ~Exit() { guard->exit(); }
  };

  static constexpr const char* kNoCount = "a lane has written fewer rows than none, or more than can be";

  Lanes lanes_;
  std::vector<Observation> leaves_;
  std::vector<Block> columns_;
  std::vector<std::vector<int64_t>> leaf_shapes_, column_shapes_;
  size_t reward_;
  ResetSteps resets_;
  int64_t first_;
  Step step_;
  std::vector<Move> moves_;
  Flags terminated_, truncated_, mask_, has_final_;
  bool has_mask_ = false, has_finals_ = false, some_final_ = false;  // of the values that were found
  int64_t steps_ = 0;  // their first axis, or 0 if they have none for steps
  std::vector<Given> givens_;
  Given list_, entry_;
  std::vector<Rule> rules_;
  nb::object kept_, tables_, watched_;  // the owners of the memory that is pointed to
  int64_t room_ = 0;  // steps that may still be written
  int64_t repeated_ = -1;
  bool writing_ = false;
  Guard* guard_ = nullptr;
  nb::object guard_owner_;
  std::function<void()> follow_;
};

// Restores tables that come from a disk; see restore.h. counters: int64 [5, lanes]; episode_of: int32 [lanes, rows], which may be
// strided; the others as in EpisodeRing::set_tables. Returns (fault or 0, lane, time).
inline std::tuple<int64_t, int64_t, int64_t> restore_tables(nb::handle counters, nb::handle episode_of, nb::handle episodes,
                                                            nb::handle free_slots, int64_t kept, bool has_starts) {
  Lanes lanes;
  const Block slot_block = bind_block(episode_of, &lanes.lanes, &lanes.rows);
  if (!(slot_block.dtype == DLDataType{kInt, 32, 1}) || slot_block.bytes != 4) throw nb::value_error("episode_of is int32 [lanes, rows]");
  const DLTensor described = describe(episodes);
  if (lanes.lanes < 1 || lanes.rows < 1 || kept < 1 || described.ndim != 2 || described.shape[1] != 4 || described.shape[0] % lanes.lanes)
    throw nb::value_error("a ring has lanes, rows and as many slots in each lane");
  lanes.kept = kept, lanes.slots = described.shape[0], lanes.table_lanes = lanes.lanes, lanes.by_rows = Divider(lanes.rows);
  lanes.episode_of = slot_block.base, lanes.lane_stride = slot_block.lane_stride, lanes.row_stride = slot_block.row_stride;
  int64_t* counts = typed<int64_t>(counters, static_cast<size_t>(5 * lanes.lanes));
  int64_t** bound[] = {&lanes.written, &lanes.begun, &lanes.current, &lanes.after_end, &lanes.free_count};
  for (size_t i = 0; i < 5; i++) *bound[i] = counts + static_cast<int64_t>(i) * lanes.lanes;
  lanes.episodes = reinterpret_cast<Episode*>(typed<int64_t>(episodes, static_cast<size_t>(lanes.slots * 4)));
  lanes.free_slots = typed<int32_t>(free_slots, static_cast<size_t>(lanes.slots));
  const Finding found = restore_lanes(lanes, has_starts);
  return {static_cast<int64_t>(found.fault), found.lane, found.time};
}

}  // namespace rlstore
