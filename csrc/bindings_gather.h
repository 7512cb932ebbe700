// Python bindings that gather batches from a ring of episodes.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "bindings_draws.h"
#include "bindings_outputs.h"
#include "bindings_replay.h"

namespace rlstore {

// The fields of a batch, bound to a ring.
class ReplayGather {
 public:
  // requests: (part, leaf, as_float, shape of one row).
  ReplayGather(nb::object ring, nb::tuple requests, int64_t n_step, double gamma) : owner_(ring), ring_(nb::cast<EpisodeRing*>(ring)) {
    if (n_step < 1) throw nb::value_error("n_step is at least 1");
    fold_.n_step = std::min(n_step, ring_->lanes().steps);
    for (int64_t k = 0; k <= fold_.n_step; k++) fold_.powers.push_back(static_cast<float>(std::pow(gamma, static_cast<double>(k))));
    for (nb::handle item : requests) {
      nb::tuple request = parts(item, 4, "a request is (part, leaf, as_float, shape)");
      Output output{static_cast<Part>(nb::cast<int32_t>(request[0]))};
      output.leaf = nb::cast<size_t>(request[1]);
      output.as_float = nb::cast<bool>(request[2]);
      dtypes_.push_back(dtype_of(output));  // refuses a leaf or column that there is not
      shapes_.push_back(bind_shape(request[3]));
      output.bytes = row_bytes(output);
      if (!fills(shapes_.back(), dtypes_.back(), output.bytes)) throw nb::value_error("a request's shape is not that of its rows");
      outputs_.push_back(output);
    }
  }

  // Returns one tensor [*rows.shape, ...] for each request, in the given tensors or (where None) in new ones. A row of -1
  // gives zeros. Rows [windows, length] are windows of consecutive rows. Returns None if another process has overwritten
  // some of the rows in the meantime.
  nb::object gather(nb::handle rows, nb::object given) const {
    const DLTensor row_view = describe(rows);
    const std::vector<int64_t> lead(row_view.shape, row_view.shape + row_view.ndim);
    const size_t count = element_count(row_view);
    const int64_t* ids = typed<int64_t>(rows, count);
    return gather_into(ids, count, lead, given);
  }

  // gather() of `count` rows, drawn as by EpisodeRing::draw, without returning the rows.
  nb::object sample(nb::handle generator, int64_t count) const {
    if (count < 0 || count >= kCountLimit) throw nb::value_error("sample: a count of rows");
    std::vector<int64_t> rows(static_cast<size_t>(count));
    ring_->draw_into(generator, rows.data(), rows.size());
    return gather_into(rows.data(), rows.size(), {count}, nb::none());
  }

  // gather() of `count` rows, drawn as by Priorities::draw: (tensors, weights, rows); None if every priority is 0.
  nb::object sample_by_priority(Priorities& priorities, nb::handle generator, double beta, int64_t count) const {
    if (count < 0 || count >= kCountLimit || priorities.ring() != ring_) throw nb::value_error("sample: a count of this ring's rows");
    const size_t size = static_cast<size_t>(count);
    int64_t* rows;
    float* weights;
    nb::object row_tensor = make_of(&rows, {count}), weight_tensor = make_of(&weights, {count, 1});
    if (!priorities.draw_into(generator, beta, rows, weights, size)) return nb::none();
    nb::object tensors = gather_into(rows, size, {count}, nb::none());
    if (tensors.is_none()) return tensors;
    return nb::make_tuple(tensors, weight_tensor, row_tensor);
  }

  // gather() of the rows of `count` windows, drawn as by WindowIndex::draw or, with priorities, by Priorities::draw: (tensors,
  // weights or None, the first row of each window); None if there is no window or every priority is 0.
  nb::object sample_windows(const WindowIndex& windows, Priorities* priorities, nb::handle generator, double beta, int64_t count) const {
    if (count < 0 || count >= kCountLimit || windows.ring() != ring_ || (priorities && priorities->ring() != ring_))
      throw nb::value_error("sample: a count of this ring's windows");
    if (windows.count() == 0) return nb::none();
    const size_t size = static_cast<size_t>(count);
    int64_t* begins;
    float* weights;
    nb::object begin_tensor = make_of(&begins, {count}), weight_tensor = nb::none();
    if (priorities) {
      weight_tensor = make_of(&weights, {count, 1});
      if (!priorities->draw_into(generator, beta, begins, weights, size)) return nb::none();
    } else {
      windows.draw_into(generator, begins, size);
    }
    std::vector<int64_t> rows(product(size, static_cast<size_t>(windows.length())));
    ring_->expand(begins, size, static_cast<size_t>(windows.length()), windows.across(), rows.data());
    nb::object tensors = gather_into(rows.data(), rows.size(), {count, windows.length()}, nb::none());
    if (tensors.is_none()) return tensors;
    return nb::make_tuple(tensors, weight_tensor, begin_tensor);
  }

 private:
  template <typename T>
  static nb::object make_of(T** memory, const std::vector<int64_t>& shape) {
    size_t bytes = sizeof(T);
    for (int64_t size : shape) bytes = product(bytes, static_cast<size_t>(size));
    const DLDataType dtype{std::is_floating_point_v<T> ? kFloat : kInt, sizeof(T) * 8, 1};
    return make_tensor(dtype, shape, bytes, reinterpret_cast<char**>(memory));
  }

  nb::object gather_into(const int64_t* ids, size_t count, const std::vector<int64_t>& lead, nb::object given) const {
    ring_->require_tables();
    if (!given.is_none()) parts(given, outputs_.size(), "gather: an output for each request");
    nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(outputs_.size())));
    std::vector<Output> outputs = outputs_;
    std::vector<int64_t> shape = lead;
    for (size_t k = 0; k < outputs.size(); k++) {
      Output& output = outputs[k];
      const size_t bytes = product(count, output.bytes);
      nb::object tensor;
      if (given.is_none() || given[k].is_none()) {
        shape.resize(lead.size());
        shape.insert(shape.end(), shapes_[k].begin(), shapes_[k].end());
        tensor = bytes < kLarge ? make_tensor(dtypes_[k], shape, bytes, &output.memory) : make_large(dtypes_[k], shape, &output.memory);
      } else {
        tensor = given[k];
        const DLTensor target = describe(tensor);
        if (!(target.dtype == dtypes_[k]) || element_count(target) * element_bytes(target) != bytes)
          throw nb::value_error("gather: an output does not fit");
        output.memory = address(target);
      }
      PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(k), tensor.release().ptr());
      output.streamed = bytes >= kStreamed && output.bytes >= kLongRow;
    }
    std::vector<int64_t> written;
    const Lanes lanes = settled(&written);
    Gathered gathered;
    {
      nb::gil_scoped_release released;
      gathered = lanes.written_now ? copy_beside_writers(lanes, ids, count, lead, outputs) : copy(lanes, ids, count, lead, outputs);
    }
    if (gathered == Gathered::kNotHeld) throw nb::index_error("a row is not held");
    if (gathered == Gathered::kOverrun) return nb::none();
    return made;
  }

  Gathered copy(const Lanes& lanes, const int64_t* ids, size_t count, const std::vector<int64_t>& lead, const std::vector<Output>& outputs) const {
    if (lead.size() == 2 && lead[1] > 0)
      return gather_windows(lanes, ring_->leaves(), ring_->columns(), ring_->reward(), fold_, ids, static_cast<size_t>(lead[0]),
                            static_cast<size_t>(lead[1]), outputs);
    return gather_transitions(lanes, ring_->leaves(), ring_->columns(), ring_->reward(), fold_, ids, count, outputs);
  }

  // Others may overwrite a row while it is copied, which is found out afterwards (kOverrun): a race by design, and the only one.
  // The thread sanitizer is told of it by the name of this function (tools/sanitize/races.txt).
  __attribute__((noinline)) Gathered copy_beside_writers(const Lanes& lanes, const int64_t* ids, size_t count, const std::vector<int64_t>& lead,
                                                         const std::vector<Output>& outputs) const {
    const Gathered gathered = copy(lanes, ids, count, lead, outputs);
    asm volatile("");  // no tail call: the function stays on the stack
    return gathered;
  }

  // An output in memory that may have been used before.
  nb::object make_large(DLDataType dtype, const std::vector<int64_t>& shape, char** memory) const {
    if (++made_ % kPeriod == 0) pool_.begin();  // drops what was not reused for so long
    std::vector<Form> form{{dtype, shape}};
    nb::object tensor = pool_.make(&form)[0];
    *memory = form[0].memory;
    return tensor;
  }

  // A copy of the lanes' state. Where other processes write, the ring may observe more rows while a thread gathers; rows that
  // were drawn before remain valid until the writers overwrite them.
  Lanes settled(std::vector<int64_t>* written) const {
    Lanes lanes = ring_->lanes();
    if (!lanes.written_now) return lanes;
    written->assign(lanes.written, lanes.written + lanes.lanes);
    lanes.written = written->data();
    lanes.steps = lanes.kept;
    return lanes;
  }

  static constexpr size_t kKeep = 512 << 20;  // bytes of large outputs that are kept while nobody uses them
  static constexpr size_t kLarge = 256 << 10, kPeriod = 512;  // bytes; outputs
  static constexpr size_t kStreamed = 512 << 10, kLongRow = 2048;  // bytes; too large to stay in a cache

  // Bytes of one row of an output.
  size_t row_bytes(const Output& output) const {
    switch (output.part) {
      case Part::kObservation:
      case Part::kNext: return bytes_of(output, ring_->leaves()[output.leaf].block, ring_->leaves()[output.leaf].stack_bytes());
      case Part::kColumn: return bytes_of(output, ring_->columns()[output.leaf], ring_->columns()[output.leaf].bytes);
      case Part::kRewards: return ring_->columns()[ring_->reward()].bytes;
      case Part::kDiscounts: return sizeof(float);
      default: return 1;
    }
  }

  static size_t bytes_of(const Output& output, const Block& block, size_t bytes) {
    return output.as_float ? bytes * 8 / block.dtype.bits * sizeof(float) : bytes;
  }

  DLDataType dtype_of(const Output& output) const {
    const DLDataType real{kFloat, 32, 1};
    const auto stored = [&](const DLDataType& dtype) {
      if (output.as_float && !convertible(dtype, real)) throw nb::value_error("a request for a dtype that is not converted");
      return output.as_float ? real : dtype;
    };
    switch (output.part) {
      case Part::kObservation:
      case Part::kNext: return stored(ring_->leaves().at(output.leaf).block.dtype);
      case Part::kColumn: return stored(ring_->columns().at(output.leaf).dtype);
      case Part::kRewards:
      case Part::kDiscounts: return real;
      case Part::kTerminated:
      case Part::kTruncated:
      case Part::kFirst:
      case Part::kHeld: return DLDataType{kBool, 8, 1};
    }
    throw nb::value_error("a request for a part that there is not");
  }

  nb::object owner_;
  EpisodeRing* ring_;
  Fold fold_;
  std::vector<Output> outputs_;
  std::vector<DLDataType> dtypes_;
  std::vector<std::vector<int64_t>> shapes_;
  mutable OutputPool pool_{kKeep};
  mutable size_t made_ = 0;  // large outputs
};

}  // namespace rlstore
