// Hand-off slots in shared memory. There is no lock, so a killed process cannot hold one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "processes.h"

namespace rlstore {

enum class SlotState : uint64_t { kFree, kWriting, kFull, kReading };

// One word per slot: its state, its owner, and its position in the order. Every change is one compare-and-swap of that word,
// so a killed process leaves each slot as it was before or after the change, and its slots can be identified and reclaimed.
// All memory is shared and initially zero: every slot is free.
class SlotTable {
 public:
  static constexpr uint64_t kOwners = uint64_t{1} << 16;

  // words: [count], written by any process with compare-and-swap (acquire and release). ticket: counts the hand-offs, with
  // atomic additions. events: [4], one for each state that a slot can enter. done: [2], the slots that were written and
  // passed on as full, and those that were read and passed on as free; atomic additions.
  SlotTable(uint64_t* words, size_t count, uint64_t* ticket, Event* events, uint64_t* done)
      : words_(words), count_(count), ticket_(ticket), events_(events), done_(done) {}

  size_t count() const { return count_; }

  // Moves the slot that has been longest in the state `from` to `to`, owned by `owner`; it keeps its position in the order.
  // Waits until there is one; returns -1 after the deadline.
  int64_t take(SlotState from, SlotState to, uint64_t owner, const Deadline& deadline);

  // Moves a slot from `from` to `to`, last in the order and without an owner. False if `owner` does not own it in `from`.
  bool give(int64_t slot, SlotState from, SlotState to, uint64_t owner);

  // Reclaims the slots of a dead owner: those being written become free, those being read full, in their old order.
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
