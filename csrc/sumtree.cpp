#include "sumtree.h"

#include "simd.h"

namespace rlstore {

namespace {

constexpr size_t kWidth = SumTree::kWidth;
constexpr size_t kAhead = 16;  // entries; far enough to hide a cache miss

// Four running sums: the order of additions is fixed, and four are independent of each other.
template <typename Real>
RLSTORE_INLINE double sum_group(const Real* group) {
  double sums[4] = {0, 0, 0, 0};
  for (size_t i = 0; i < kWidth; i += 4)
    for (size_t k = 0; k < 4; k++) sums[k] += group[i + k];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

RLSTORE_INLINE float max_group(const float* group) {
  float largest[4];
  for (size_t k = 0; k < 4; k++) {
    const float a = group[k] > group[k + 4] ? group[k] : group[k + 4], b = group[k + 8] > group[k + 12] ? group[k + 8] : group[k + 12];
    largest[k] = a > b ? a : b;
  }
  const float a = largest[0] > largest[1] ? largest[0] : largest[1], b = largest[2] > largest[3] ? largest[2] : largest[3];
  return a > b ? a : b;
}

// The first of four whose running sum exceeds the target; the sum before it is subtracted from the target.
RLSTORE_INLINE int64_t pick_of_four(double a, double b, double c, double* target) {
  const double ab = a + b, abc = ab + c, t = *target;
  const int64_t passed = static_cast<int64_t>(a <= t) + (ab <= t) + (abc <= t);
  const double before[4] = {0, a, ab, abc};
  *target = t - before[passed];
  return passed;
}

// The child that contains the target; the target becomes relative to the beginning of that child.
template <typename Real>
RLSTORE_INLINE int64_t pick_child(const Real* group, double* target) {
  double quarters[4];
  for (size_t q = 0; q < 4; q++) {
    const Real* quarter = group + q * 4;
    quarters[q] = (static_cast<double>(quarter[0]) + quarter[1]) + (static_cast<double>(quarter[2]) + quarter[3]);
  }
  const int64_t quarter = pick_of_four(quarters[0], quarters[1], quarters[2], target);
  const Real* four = group + quarter * 4;
  int64_t child = quarter * 4 + pick_of_four(four[0], four[1], four[2], target);
  if (group[child] > 0) return child;
  // Rounding moved the target past the end: take the last non-zero child before it, or else the first after it.
  *target = 0;
  int64_t held = child;
  while (held > 0 && !(group[held] > 0)) held--;
  while (held + 1 < static_cast<int64_t>(kWidth) && !(group[held] > 0)) held++;
  return held;
}

RLSTORE_CLONES
void refresh_parents(const float* leaves, const double* lower_sums, const float* lower_maxima, double* sums, float* maxima,
                     const int64_t* parents, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const size_t group = static_cast<size_t>(parents[i]);
    if (i + kAhead < count) {
      __builtin_prefetch(sums + parents[i + kAhead], 1);
      __builtin_prefetch(maxima + parents[i + kAhead], 1);
    }
    if (leaves) {
      sums[group] = sum_group(leaves + group * kWidth);
      maxima[group] = max_group(leaves + group * kWidth);
    } else {
      sums[group] = sum_group(lower_sums + group * kWidth);
      maxima[group] = max_group(lower_maxima + group * kWidth);
    }
  }
}

// Writes only what differs: memory of zeros that was never written, of rows that are still to come, is not taken.
template <typename Real>
RLSTORE_INLINE void correct_parents(const Real* lower_sums, const float* lower_maxima, double* sums, float* maxima, size_t groups) {
  for (size_t group = 0; group < groups; group++) {
    const double sum = sum_group(lower_sums + group * kWidth);
    const float largest = max_group(lower_maxima + group * kWidth);
    if (sums[group] != sum) sums[group] = sum;
    if (maxima[group] != largest) maxima[group] = largest;
  }
}

RLSTORE_CLONES
void descend_sums(const double* sums, double* targets, int64_t* indices, size_t count) {
  for (size_t i = 0; i < count; i++)
    indices[i] = indices[i] * static_cast<int64_t>(kWidth) + pick_child(sums + indices[i] * kWidth, targets + i);
}

RLSTORE_CLONES
void descend_leaves(const float* leaves, double* targets, int64_t* indices, size_t count) {
  for (size_t i = 0; i < count; i++)
    indices[i] = indices[i] * static_cast<int64_t>(kWidth) + pick_child(leaves + indices[i] * kWidth, targets + i);
}

}  // namespace

std::vector<size_t> SumTree::level_sizes(size_t leaves) {
  std::vector<size_t> sizes;
  size_t entries = leaves;
  do {
    entries = (entries + kWidth - 1) / kWidth;                     // one per group of 16 below
    sizes.push_back((entries + kWidth - 1) / kWidth * kWidth);     // rounded up to whole groups
  } while (entries > kWidth);
  return sizes;
}

SumTree::SumTree(float* leaves, size_t count, double* sums, float* maxima)
    : leaves_(leaves), count_(count), sizes_(level_sizes(count)) {
  for (size_t size : sizes_) {
    sums_.push_back(sums);
    maxima_.push_back(maxima);
    sums += size;
    maxima += size;
  }
}

double SumTree::total() const { return sum_group(sums_.back()); }

float SumTree::maximum() const { return max_group(maxima_.back()); }

void SumTree::set(const int64_t* indices, const float* values, size_t count) {
  parents_.resize(count);
  for (size_t i = 0; i < count; i++) {
    if (i + kAhead < count) __builtin_prefetch(leaves_ + indices[i + kAhead], 1);
    leaves_[indices[i]] = values[i];
    parents_[i] = indices[i];
  }
  for (size_t level = 0; level < sizes_.size(); level++) {
    // Neighbors share their parent: one refresh for a run of them.
    size_t distinct = 0;
    for (size_t i = 0; i < count; i++) {
      const int64_t parent = parents_[i] / static_cast<int64_t>(kWidth);
      if (distinct == 0 || parents_[distinct - 1] != parent) parents_[distinct++] = parent;
    }
    count = distinct;
    const size_t groups = (level == 0 ? count_ : sizes_[level - 1]) / kWidth;
    if (count > groups) {  // the top of the tree: cheaper to refresh completely than once per leaf
      count = groups;
      for (size_t i = 0; i < count; i++) parents_[i] = static_cast<int64_t>(i);
    }
    refresh_parents(level == 0 ? leaves_ : nullptr, level == 0 ? nullptr : sums_[level - 1],
                    level == 0 ? nullptr : maxima_[level - 1], sums_[level], maxima_[level], parents_.data(), count);
  }
}

void SumTree::rebuild() {
  size_t below = count_;
  for (size_t level = 0; level < sizes_.size(); level++) {
    if (level == 0)
      correct_parents(leaves_, leaves_, sums_[0], maxima_[0], below / kWidth);
    else
      correct_parents(sums_[level - 1], maxima_[level - 1], sums_[level], maxima_[level], below / kWidth);
    below = sizes_[level];
  }
}

void SumTree::find(double* targets, int64_t* indices, size_t count) const {
  for (size_t i = 0; i < count; i++) indices[i] = 0;
  for (size_t level = sizes_.size(); level-- > 0;) {
    descend_sums(sums_[level], targets, indices, count);
    for (size_t i = 0; i < count; i++) {
      const int64_t first = indices[i] * static_cast<int64_t>(kWidth);
      if (level == 0)
        prefetch_far(leaves_ + first);
      else
        for (size_t line = 0; line < kWidth; line += 8) prefetch_far(sums_[level - 1] + first + line);
    }
  }
  descend_leaves(leaves_, targets, indices, count);
}

}  // namespace rlstore
