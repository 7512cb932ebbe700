// A two-sided rate limiter in shared memory: neither inserts nor samples get too far ahead.
#pragma once

#include <cstdint>

#include "processes.h"

namespace rlstore {

// With spi samples per insert: inserts are allowed while inserted * spi - sampled stays at or below
// min_size * spi + tolerance (or inserted at or below min_size); samples are allowed while inserted is at least min_size and
// the difference stays at or above min_size * spi - tolerance. All memory is shared and initially zero, which allows
// everything.
class Limiter {
 public:
  enum Rule { kOn, kSamplesPerInsert, kMinSize, kTolerance, kRules };
  enum Count { kInserted, kSampled, kCounts };

  // counts: [2], only increased, by compare-and-swap: a stale read of the other side's count is too small, which allows
  // less than the rule. rule: [4], written by the storage's creator, read by all. events: [2], one for each count.
  Limiter(int64_t* counts, double* rule, Event* events) : counts_(counts), rule_(rule), events_(events) {}

  // Counts `count` inserts or samples as soon as the rule allows them; false after the deadline.
  bool acquire(Count side, int64_t count, const Deadline& deadline);
  bool allows(Count side, int64_t inserted, int64_t sampled, int64_t count) const;
  // Wakes all waiting processes after the rule was changed.
  void wake_all();

 private:
  double rule(Rule which) const;

  int64_t* counts_;
  double* rule_;
  Event* events_;
};

}  // namespace rlstore
