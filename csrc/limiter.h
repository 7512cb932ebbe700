// A rate limiter of two sides in shared memory: neither those that insert nor those that sample get too far ahead.
#pragma once

#include <cstdint>

#include "processes.h"

namespace rlstore {

// With spi samples for each insert: an insert may go ahead while inserted * spi - sampled stays at or below
// min_size * spi + tolerance (or no more than min_size are in); samples while at least min_size are in and it stays at or
// above min_size * spi - tolerance. All memory is shared and zero at first, which lets everything go ahead.
class Limiter {
 public:
  enum Rule { kOn, kSamplesPerInsert, kMinSize, kTolerance, kRules };
  enum Count { kInserted, kSampled, kCounts };

  // counts: [2], only ever raised, by an exchange: what one side has read of the other can only have become more, which
  // allows it more. rule: [4], changed by the storage's maker, read by all. events: [2], one for each count.
  Limiter(int64_t* counts, double* rule, Event* events) : counts_(counts), rule_(rule), events_(events) {}

  // Counts `count` inserts or samples as soon as the rule lets them go ahead; false after the deadline.
  bool acquire(Count side, int64_t count, const Deadline& deadline);
  bool allows(Count side, int64_t inserted, int64_t sampled, int64_t count) const;
  // The rule was changed: everybody looks again.
  void wake_all();

 private:
  double rule(Rule which) const;

  int64_t* counts_;
  double* rule_;
  Event* events_;
};

}  // namespace rlstore
