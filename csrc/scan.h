// Backward scans over [steps, lanes]: targets and advantages from rewards, values and the two end flags.
//
// All of them treat the end of an episode in the same way, for each step and lane:
//   terminated                 no bootstrap, and no contribution from later steps
//   truncated (and only that)  bootstrap from final_values, and no contribution from later steps;
//                              where the final value is unknown (null, or NaN) the target is the step's own value
//   neither                    bootstrap from the next step's value; in the last step from last_values
#pragma once

#include <cstddef>
#include <cstdint>

namespace rlstore {

template <typename Real>
struct Rollout {
  size_t steps, lanes;
  const Real* rewards;         // [steps, lanes]
  const Real* values;          // [steps, lanes]; null for discounted returns
  const Real* last_values;     // [lanes]
  const uint8_t* terminated;   // [steps, lanes]
  const uint8_t* truncated;    // [steps, lanes] or null: none
  const Real* final_values;    // [steps, lanes] or null: none known
};

template <typename Real>
void gae(const Rollout<Real>& rollout, Real gamma, Real lam, Real* advantages, Real* returns);

// Without values an unknown final value counts as 0: the target of that step is its reward.
template <typename Real>
void discounted_returns(const Rollout<Real>& rollout, Real gamma, Real* returns);

template <typename Real>
void n_step_returns(const Rollout<Real>& rollout, Real gamma, size_t n, Real* returns);

template <typename Real>
struct VtraceClips {
  Real rho, c, pg_rho;
};

template <typename Real>
void vtrace(const Rollout<Real>& rollout, const Real* log_rhos, Real gamma, Real lam, VtraceClips<Real> clips,
            Real* targets, Real* advantages);

// x = (x - mean) / (std + epsilon) in place, std unbiased, moments in double.
template <typename Real>
void normalize(Real* x, size_t count, double epsilon);

}  // namespace rlstore
