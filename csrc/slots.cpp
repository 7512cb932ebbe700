#include "slots.h"

#include <climits>

namespace rlstore {

namespace {

constexpr int kTicketShift = 18, kOwnerShift = 2;

SlotState state_of(uint64_t word) { return static_cast<SlotState>(word & 3); }
uint64_t owner_of(uint64_t word) { return (word >> kOwnerShift) & (SlotTable::kOwners - 1); }
uint64_t ticket_of(uint64_t word) { return word >> kTicketShift; }

uint64_t make_word(uint64_t ticket, uint64_t owner, SlotState state) {
  return ticket << kTicketShift | owner << kOwnerShift | static_cast<uint64_t>(state);
}

bool exchange_word(uint64_t* word, uint64_t expected, uint64_t wanted) {
  return __atomic_compare_exchange_n(word, &expected, wanted, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

}  // namespace

int64_t SlotTable::oldest(SlotState state, uint64_t* word) const {
  int64_t found = -1;
  for (size_t slot = 0; slot < count_; slot++) {
    const uint64_t here = __atomic_load_n(words_ + slot, __ATOMIC_ACQUIRE);
    if (state_of(here) != state || (found >= 0 && ticket_of(here) >= ticket_of(*word))) continue;
    found = static_cast<int64_t>(slot), *word = here;
  }
  return found;
}

int64_t SlotTable::try_take(SlotState from, SlotState to, uint64_t owner) {
  uint64_t word = 0, again = 0;
  int64_t slot = oldest(from, &word);
  while (slot >= 0) {
    // Two scans that agree: no older slot appeared during the first one, so the order is correct.
    const int64_t second = oldest(from, &again);
    if (second == slot && again == word && exchange_word(words_ + slot, word, make_word(ticket_of(word), owner, to))) return slot;
    slot = second, word = again;
  }
  return -1;
}

int64_t SlotTable::take(SlotState from, SlotState to, uint64_t owner, const Deadline& deadline) {
  Event& event = events_[static_cast<size_t>(from)];
  for (;;) {
    const uint32_t seen = event.seen();
    const int64_t slot = try_take(from, to, owner);
    if (slot >= 0 || deadline.left() == 0) return slot;
    event.wait(seen, deadline);
  }
}

bool SlotTable::give(int64_t slot, SlotState from, SlotState to, uint64_t owner) {
  uint64_t* word = words_ + slot;
  const uint64_t here = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  if (state_of(here) != from || owner_of(here) != owner) return false;
  const uint64_t ticket = __atomic_add_fetch(ticket_, 1, __ATOMIC_ACQ_REL);
  // Counted before the wake-up: during it this process may be preempted, and killed.
  const bool written = from == SlotState::kWriting && to == SlotState::kFull, read = from == SlotState::kReading && to == SlotState::kFree;
  uint64_t* done = written ? done_ : read ? done_ + 1 : nullptr;
  if (done) __atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL);
  if (!exchange_word(word, here, make_word(ticket, 0, to))) {
    if (done) __atomic_sub_fetch(done, 1, __ATOMIC_ACQ_REL);
    return false;
  }
  events_[static_cast<size_t>(to)].happen(1);
  return true;
}

void SlotTable::reclaim(uint64_t owner, int64_t* written, int64_t* read) {
  *written = *read = 0;
  for (size_t slot = 0; slot < count_; slot++) {
    const uint64_t here = __atomic_load_n(words_ + slot, __ATOMIC_ACQUIRE);
    if (owner_of(here) != owner) continue;
    const bool writing = state_of(here) == SlotState::kWriting;
    if (!writing && state_of(here) != SlotState::kReading) continue;
    const SlotState to = writing ? SlotState::kFree : SlotState::kFull;
    if (!exchange_word(words_ + slot, here, make_word(ticket_of(here), 0, to))) continue;
    ++*(writing ? written : read);
    events_[static_cast<size_t>(to)].happen(1);
  }
}

void SlotTable::wake_all() {
  for (size_t state = 0; state < 4; state++) events_[state].happen(INT_MAX);
}

}  // namespace rlstore
