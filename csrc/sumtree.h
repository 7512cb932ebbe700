// Priorities by leaf: sums and maxima over groups of 16, so that a draw or an update touches a few cache lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rlstore {

// Leaves are float; the sums above them are double, so that a draw among millions of leaves is not rounded to a
// neighbor. A parent is always recomputed from its 16 children, never adjusted: there is no drift.
class SumTree {
 public:
  static constexpr size_t kWidth = 16;

  // Entries of each level above the leaves, each a multiple of 16; the last has 16, whose sum is the total.
  static std::vector<size_t> level_sizes(size_t leaves);

  // leaves: a multiple of 16 entries; sums and maxima: the levels above, concatenated. Zero memory is an empty tree.
  SumTree(float* leaves, size_t count, double* sums, float* maxima);

  float leaf(int64_t index) const { return leaves_[index]; }
  // Before set().
  void prefetch(int64_t index) const { __builtin_prefetch(leaves_ + index, 1); }
  double total() const;
  float maximum() const;
  // leaf[indices[i]] = values[i], in order, and their parents.
  void set(const int64_t* indices, const float* values, size_t count);
  // The leaf that contains each target, 0 <= target < total(); never a leaf of 0 unless all are 0.
  void find(double* targets, int64_t* indices, size_t count) const;
  // Recomputes every parent from its children, and takes no memory for those that are 0 and were never written.
  void rebuild();

 private:
  float* leaves_;
  size_t count_;
  std::vector<size_t> sizes_;
  std::vector<double*> sums_;
  std::vector<float*> maxima_;
  std::vector<int64_t> parents_;
};

}  // namespace rlstore
