// Slots that processes hand to one another, in shared memory: no lock, so nobody who is killed can hold one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "processes.h"

namespace rlstore {

enum class SlotState : uint64_t { kFree, kWriting, kFull, kReading };

// One word a slot: its state, who has it, and its place in the order. Every change is one exchange of that word, so a
// process that is killed leaves each slot as it was before the change or after it, and what it held can be told.
// All memory is shared and zero at first: every slot free.
class SlotTable {
 public:
  static constexpr uint64_t kOwners = uint64_t{1} << 16;

  // words: [count], written by anyone with an exchange (acquire and release). ticket: counts the hand-offs, an atomic
  // addition. events: [4], one for each state that a slot can come into. done: [2], slots that were written and given on
  // as full, and that were read and given on as free; atomic additions.
  SlotTable(uint64_t* words, size_t count, uint64_t* ticket, Event* events, uint64_t* done)
      : words_(words), count_(count), ticket_(ticket), events_(events), done_(done) {}

  size_t count() const { return count_; }

  // The slot that has been longest in the state `from`, now in `to` and the owner's; it keeps its place in the order.
  // Waits until there is one; -1 after the deadline.
  int64_t take(SlotState from, SlotState to, uint64_t owner, const Deadline& deadline);

  // From `from` to `to`, where it is the last in the order and nobody's. False if it is not `owner`'s in that state.
  bool give(int64_t slot, SlotState from, SlotState to, uint64_t owner);

  // Takes what a dead owner had: what it was writing becomes free, what it was reading is full again, at its old place.
  void reclaim(uint64_t owner, int64_t* written, int64_t* read);

  void wake_all();

 private:
  int64_t try_take(SlotState from, SlotState to, uint64_t owner);
  int64_t oldest(SlotState state, uint64_t* word) const;

  uint64_t* words_;
  size_t count_;
  uint64_t* ticket_;
  Event* events_;
  uint64_t* done_;
};

}  // namespace rlstore
