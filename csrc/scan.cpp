#include "scan.h"

#include <cmath>
#include <vector>

#include "simd.h"

namespace rlstore {

namespace {

// The end flags of one step. Flags that a rollout does not have are removed at compile time.
template <typename Real, bool HasTruncated, bool HasFinal>
struct Ends {
  const uint8_t* terminated;
  const uint8_t* truncated;
  const Real* final_values;

  RLSTORE_INLINE Ends(const Rollout<Real>& rollout, size_t t)
      : terminated(rollout.terminated + t * rollout.lanes),
        truncated(HasTruncated ? rollout.truncated + t * rollout.lanes : nullptr),
        final_values(HasFinal ? rollout.final_values + t * rollout.lanes : nullptr) {}

  // No short-circuit evaluation here: an unconditional load can be vectorized, one behind a branch cannot.

  RLSTORE_INLINE bool cut(size_t i) const {
    bool result = terminated[i] != 0;
    if constexpr (HasTruncated) result |= truncated[i] != 0;
    return result;
  }

  // Truncated, not terminated, and the value of the final observation is not known.
  RLSTORE_INLINE bool unknown(size_t i) const {
    if constexpr (!HasTruncated) return false;
    bool result = (truncated[i] != 0) & (terminated[i] == 0);
    if constexpr (HasFinal) result &= final_values[i] != final_values[i];
    return result;
  }

  // The value to bootstrap from, where it is known.
  RLSTORE_INLINE Real bootstrap(size_t i, Real next) const {
    Real chosen = next;
    if constexpr (HasTruncated) {
      Real final_value = 0;
      if constexpr (HasFinal) final_value = final_values[i];
      chosen = truncated[i] ? final_value : chosen;
    }
    return terminated[i] ? Real(0) : chosen;
  }
};

template <typename Real>
RLSTORE_INLINE const Real* next_values(const Rollout<Real>& rollout, size_t t) {
  return t + 1 < rollout.steps ? rollout.values + (t + 1) * rollout.lanes : rollout.last_values;
}

// Calls body(ends_type{}) with the flags that this rollout has as compile-time constants.
template <typename Real, typename Body>
RLSTORE_INLINE void with_ends(const Rollout<Real>& rollout, Body body) {
  if (!rollout.truncated) {
    for (size_t t = rollout.steps; t-- > 0;) body(t, Ends<Real, false, false>(rollout, t));
  } else if (!rollout.final_values) {
    for (size_t t = rollout.steps; t-- > 0;) body(t, Ends<Real, true, false>(rollout, t));
  } else {
    for (size_t t = rollout.steps; t-- > 0;) body(t, Ends<Real, true, true>(rollout, t));
  }
}

template <typename Real>
RLSTORE_INLINE void gae_scan(const Rollout<Real>& rollout, Real gamma, Real lam, Real* advantages, Real* returns) {
  const size_t lanes = rollout.lanes;
  const Real decay = gamma * lam;
  const std::vector<Real> nothing(lanes, Real(0));  // after the last step
  with_ends(rollout, [&](size_t t, auto ends) __attribute__((always_inline)) {
    const Real* __restrict reward = rollout.rewards + t * lanes;
    const Real* __restrict value = rollout.values + t * lanes;
    const Real* __restrict next_value = next_values(rollout, t);
    Real* __restrict advantage = advantages + t * lanes;
    Real* __restrict target = returns + t * lanes;
    const Real* __restrict next_advantage = t + 1 == rollout.steps ? nothing.data() : advantages + (t + 1) * lanes;
#pragma omp simd
    for (size_t i = 0; i < lanes; i++) {
      const Real after = next_advantage[i];
      const Real carried = ends.cut(i) ? Real(0) : after;
      const Real delta = reward[i] + gamma * ends.bootstrap(i, next_value[i]) - value[i];
      const Real result = ends.unknown(i) ? Real(0) : delta + decay * carried;
      advantage[i] = result;
      target[i] = result + value[i];
    }
  });
}

// One step of a target: the target of row t, given the target `after` of the next step.
template <typename Real, typename EndsT>
RLSTORE_INLINE void fold_step(const Rollout<Real>& rollout, size_t t, const EndsT& ends, Real gamma, const Real* after,
                              Real* target) {
  const Real* reward = rollout.rewards + t * rollout.lanes;
  const Real* value = rollout.values ? rollout.values + t * rollout.lanes : reward;
#pragma omp simd
  for (size_t i = 0; i < rollout.lanes; i++) {
    Real result = reward[i] + gamma * ends.bootstrap(i, after[i]);
    target[i] = ends.unknown(i) ? value[i] : result;
  }
}

template <typename Real>
RLSTORE_INLINE void discounted_scan(const Rollout<Real>& rollout, Real gamma, Real* returns) {
  with_ends(rollout, [&](size_t t, auto ends) __attribute__((always_inline)) {
    const Real* after = t + 1 < rollout.steps ? returns + (t + 1) * rollout.lanes : rollout.last_values;
    fold_step(rollout, t, ends, gamma, after, returns + t * rollout.lanes);
  });
}

template <typename Real>
RLSTORE_INLINE void n_step_scan(const Rollout<Real>& rollout, Real gamma, size_t n, Real* returns) {
  // Each row has its own window, accumulated backward; `start` iterates over the rows, `t` over the window.
  for (size_t start = 0; start < rollout.steps; start++) {
    const size_t stop = n < rollout.steps - start ? start + n : rollout.steps;
    Real* target = returns + start * rollout.lanes;
    const Real* after = next_values(rollout, stop - 1);
    for (size_t t = stop; t-- > start;) {
      if (!rollout.truncated)
        fold_step(rollout, t, Ends<Real, false, false>(rollout, t), gamma, after, target);
      else if (!rollout.final_values)
        fold_step(rollout, t, Ends<Real, true, false>(rollout, t), gamma, after, target);
      else
        fold_step(rollout, t, Ends<Real, true, true>(rollout, t), gamma, after, target);
      after = target;
    }
  }
}

// NaN is kept: an invalid ratio must stay visible.
template <typename Real>
RLSTORE_INLINE Real clipped(Real ratio, Real bound) {
  return ratio > bound ? bound : ratio;
}

template <typename Real>
RLSTORE_INLINE void vtrace_scan(const Rollout<Real>& rollout, const Real* log_rhos, Real gamma, Real lam,
                                VtraceClips<Real> clips, Real* targets, Real* advantages) {
  const size_t lanes = rollout.lanes;
  with_ends(rollout, [&](size_t t, auto ends) __attribute__((always_inline)) {
    const Real* reward = rollout.rewards + t * lanes;
    const Real* value = rollout.values + t * lanes;
    const Real* next_value = next_values(rollout, t);
    const Real* log_rho = log_rhos + t * lanes;
    Real* target = targets + t * lanes;
    const bool last = t + 1 == rollout.steps;
    const Real* next_target = last ? rollout.last_values : target + lanes;
#pragma omp simd
    for (size_t i = 0; i < lanes; i++) {
      const Real rho = std::exp(log_rho[i]);
      const Real carried = ends.cut(i) ? Real(0) : next_target[i] - next_value[i];
      const Real delta = clipped(rho, clips.rho) * (reward[i] + gamma * ends.bootstrap(i, next_value[i]) - value[i]);
      const Real excess = delta + gamma * lam * clipped(rho, clips.c) * carried;
      const Real advantage = clipped(rho, clips.pg_rho) * (reward[i] + gamma * ends.bootstrap(i, next_target[i]) - value[i]);
      target[i] = ends.unknown(i) ? value[i] : value[i] + excess;
      advantages[t * lanes + i] = ends.unknown(i) ? Real(0) : advantage;
    }
  });
}

template <typename Real>
RLSTORE_INLINE void normalize_all(Real* x, size_t count, double epsilon) {
  // Relative to the first entry, so that equal entries give exactly 0, however their sum is rounded.
  const double base = x[0];
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (size_t i = 0; i < count; i++) sum += x[i] - base;
  const double mean = base + sum / static_cast<double>(count);
  double squares = 0;
#pragma omp simd reduction(+ : squares)
  for (size_t i = 0; i < count; i++) squares += (x[i] - mean) * (x[i] - mean);
  const double scale = 1.0 / (std::sqrt(squares / static_cast<double>(count - 1)) + epsilon);
  for (size_t i = 0; i < count; i++) x[i] = static_cast<Real>((x[i] - mean) * scale);
}

}  // namespace

// target_clones does not apply to templates, so each instance is written out.
#define RLSTORE_SCANS(Real)                                                                                       \
  template <>                                                                                                     \
  RLSTORE_CLONES void gae<Real>(const Rollout<Real>& rollout, Real gamma, Real lam, Real* advantages,             \
                                Real* returns) {                                                                  \
    gae_scan(rollout, gamma, lam, advantages, returns);                                                           \
  }                                                                                                               \
  template <>                                                                                                     \
  RLSTORE_CLONES void discounted_returns<Real>(const Rollout<Real>& rollout, Real gamma, Real* returns) {         \
    discounted_scan(rollout, gamma, returns);                                                                     \
  }                                                                                                               \
  template <>                                                                                                     \
  RLSTORE_CLONES void n_step_returns<Real>(const Rollout<Real>& rollout, Real gamma, size_t n, Real* returns) {   \
    n_step_scan(rollout, gamma, n, returns);                                                                      \
  }                                                                                                               \
  template <>                                                                                                     \
  RLSTORE_CLONES void vtrace<Real>(const Rollout<Real>& rollout, const Real* log_rhos, Real gamma, Real lam,      \
                                   VtraceClips<Real> clips, Real* targets, Real* advantages) {                    \
    vtrace_scan(rollout, log_rhos, gamma, lam, clips, targets, advantages);                                       \
  }                                                                                                               \
  template <>                                                                                                     \
  RLSTORE_CLONES void normalize<Real>(Real* x, size_t count, double epsilon) {                                    \
    normalize_all(x, count, epsilon);                                                                             \
  }
RLSTORE_SCANS(float)
RLSTORE_SCANS(double)
#undef RLSTORE_SCANS

}  // namespace rlstore
