#include "limiter.h"

#include <climits>

namespace rlstore {

double Limiter::rule(Rule which) const {
  double value;
  __atomic_load(rule_ + which, &value, __ATOMIC_ACQUIRE);
  return value;
}

bool Limiter::allows(Count side, int64_t inserted, int64_t sampled, int64_t count) const {
  if (rule(kOn) == 0) return true;
  const double ratio = rule(kSamplesPerInsert), least = rule(kMinSize), slack = rule(kTolerance);
  const double asked = static_cast<double>(count), in = static_cast<double>(inserted), out = static_cast<double>(sampled);
  if (side == kInserted) return in + asked <= least || (in + asked) * ratio - out <= least * ratio + slack;
  return in >= least && in * ratio - out - asked >= least * ratio - slack;
}

bool Limiter::acquire(Count side, int64_t count, const Deadline& deadline) {
  const Count other = side == kInserted ? kSampled : kInserted;
  for (;;) {
    const uint32_t seen = events_[other].seen();
    int64_t own = __atomic_load_n(counts_ + side, __ATOMIC_ACQUIRE);
    const int64_t theirs = __atomic_load_n(counts_ + other, __ATOMIC_ACQUIRE);
    if (allows(side, side == kInserted ? own : theirs, side == kInserted ? theirs : own, count)) {
      if (!__atomic_compare_exchange_n(counts_ + side, &own, own + count, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
      events_[side].happen(INT_MAX);
      return true;
    }
    if (deadline.left() == 0) return false;
    events_[other].wait(seen, deadline);
  }
}

void Limiter::wake_all() {
  for (int side = 0; side < kCounts; side++) events_[side].happen(INT_MAX);
}

}  // namespace rlstore
