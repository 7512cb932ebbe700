// Python bindings of hand-off slots, the rate limiter and atomic words, in shared memory that Python owns.
#pragma once

#include <nanobind/nanobind.h>

#include <climits>
#include <tuple>

#include "bindings_tensor.h"
#include "limiter.h"
#include "slots.h"

namespace rlstore {

// The words of an int64 tensor that has at least `least` of them; its memory must not move.
inline int64_t* shared_words(nb::handle memory, size_t least, size_t* count) {
  *count = element_count(describe(memory));
  if (*count < least) throw nb::value_error("shared words: too few of them");
  return typed<int64_t>(memory, *count);
}

inline Deadline deadline_in(double seconds) {
  if (!(seconds >= 0) || seconds > 1e6) throw nb::value_error("a wait is of 0 to 1e6 seconds");
  return Deadline(seconds);
}

// Memory, int64: the ticket, four events, slots written, slots read, one unused, and a word for each slot.
class SlotTableObject {
 public:
  static constexpr size_t kHead = 8;

  explicit SlotTableObject(nb::object memory) : memory_(memory), table_(bind(memory)) {}

  int64_t take(int from, int to, uint64_t owner, double seconds) {
    check_owner(owner);
    const SlotState have = state(from), want = state(to);
    const Deadline deadline = deadline_in(seconds);
    nb::gil_scoped_release released;
    return table_.take(have, want, owner, deadline);
  }
  bool give(int64_t slot, int from, int to, uint64_t owner) {
    check_owner(owner);
    if (slot < 0 || static_cast<size_t>(slot) >= table_.count()) throw nb::index_error("no such slot");
    return table_.give(slot, state(from), state(to), owner);
  }
  std::tuple<int64_t, int64_t> reclaim(uint64_t owner) {
    check_owner(owner);
    if (owner == 0) throw nb::value_error("owner 0 is nobody");
    int64_t written, read;
    table_.reclaim(owner, &written, &read);
    return {written, read};
  }
  void wake_all() { table_.wake_all(); }

 private:
  static SlotTable bind(nb::handle memory) {
    size_t count;
    int64_t* words = shared_words(memory, kHead, &count);
    return SlotTable(reinterpret_cast<uint64_t*>(words + kHead), count - kHead, reinterpret_cast<uint64_t*>(words),
                     reinterpret_cast<Event*>(words + 1), reinterpret_cast<uint64_t*>(words + 5));
  }
  static SlotState state(int number) {
    if (number < 0 || number > 3) throw nb::value_error("a slot has four states");
    return static_cast<SlotState>(number);
  }
  static void check_owner(uint64_t owner) {
    if (owner >= SlotTable::kOwners) throw nb::value_error("an owner is below 65536");
  }

  nb::object memory_;
  SlotTable table_;
};

// Memory, int64: two counts, the four doubles of the rule, two events.
class LimiterObject {
 public:
  explicit LimiterObject(nb::object memory) : memory_(memory), limiter_(bind(memory)) {}

  bool acquire_insert(int64_t count, double seconds) { return acquire(Limiter::kInserted, count, seconds); }
  bool acquire_sample(int64_t count, double seconds) { return acquire(Limiter::kSampled, count, seconds); }
  void wake_all() { limiter_.wake_all(); }

 private:
  bool acquire(Limiter::Count side, int64_t count, double seconds) {
    if (count < 0 || count >= int64_t{1} << 52) throw nb::value_error("a count that cannot be");
    const Deadline deadline = deadline_in(seconds);
    if (limiter_.acquire(side, count, Deadline(0))) return true;
    nb::gil_scoped_release released;
    return limiter_.acquire(side, count, deadline);
  }
  static Limiter bind(nb::handle memory) {
    size_t count;
    int64_t* words = shared_words(memory, 8, &count);
    return Limiter(words, reinterpret_cast<double*>(words + 2), reinterpret_cast<Event*>(words + 6));
  }

  nb::object memory_;
  Limiter limiter_;
};

inline int64_t* shared_word(nb::handle memory, int64_t index) {
  size_t count;
  int64_t* words = shared_words(memory, 1, &count);
  if (index < 0 || static_cast<size_t>(index) >= count) throw nb::index_error("no such word");
  return words + index;
}

// Atomically memory[index] += value; returns the value before.
inline int64_t add_to_word(nb::handle memory, int64_t index, int64_t value) {
  return __atomic_fetch_add(shared_word(memory, index), value, __ATOMIC_ACQ_REL);
}

// Atomically memory[index] = value if it was `expected`. Sequentially consistent: if two processes each set a word and then
// read the other's, at least one of them sees the other's new value.
inline bool exchange_shared_word(nb::handle memory, int64_t index, int64_t expected, int64_t value) {
  const bool exchanged =
      __atomic_compare_exchange_n(shared_word(memory, index), &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  return exchanged;
}

// Events are words of shared memory too: read the count, wait until it changes, signal.
inline uint32_t event_count(nb::handle memory, int64_t index) { return reinterpret_cast<Event*>(shared_word(memory, index))->seen(); }

inline void await_event(nb::handle memory, int64_t index, uint32_t seen, double seconds) {
  Event* event = reinterpret_cast<Event*>(shared_word(memory, index));
  const Deadline deadline = deadline_in(seconds);
  nb::gil_scoped_release released;
  event->wait(seen, deadline);
}

inline void make_event(nb::handle memory, int64_t index) { reinterpret_cast<Event*>(shared_word(memory, index))->happen(INT_MAX); }

}  // namespace rlstore
