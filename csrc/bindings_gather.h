// Python bindings that gather batches from a ring of episodes.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <vector>

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
      outputs_.push_back(output);
      shapes_.push_back(bind_shape(request[3]));
      const DLDataType dtype = dtype_of(output);  // refuses a leaf or column that there is not
      if (!fills(shapes_.back(), dtype, row_bytes(output))) throw nb::value_error("a request's shape is not that of its rows");
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

  // None: drawing by priority and gathering are two calls here.
  nb::object sample_by_priority(nb::handle, nb::handle, double, int64_t) const { return nb::none(); }

 private:
  nb::object gather_into(const int64_t* ids, size_t count, const std::vector<int64_t>& lead, nb::object given) const {
    ring_->require_tables();
    if (!given.is_none()) parts(given, outputs_.size(), "gather: an output for each request");
    nb::list made;
    std::vector<Output> outputs = outputs_;
    for (size_t k = 0; k < outputs.size(); k++) {
      const DLDataType dtype = dtype_of(outputs[k]);
      std::vector<int64_t> shape = lead;
      shape.insert(shape.end(), shapes_[k].begin(), shapes_[k].end());
      size_t elements = 1;
      for (int64_t size : shape) elements *= static_cast<size_t>(size);
      if (given.is_none() || given[k].is_none()) {
        made.append(make_tensor(dtype, shape, &outputs[k].memory));
      } else {
        DLTensor target = describe(given[k]);
        if (!(target.dtype == dtype) || element_count(target) != elements) throw nb::value_error("gather: an output does not fit");
        outputs[k].memory = address(target);
        made.append(given[k]);
      }
      outputs[k].streamed = elements * dtype.bits / 8 >= kStreamed && row_bytes(outputs[k]) >= kLongRow;
    }
    std::vector<int64_t> written;
    const Lanes lanes = settled(&written);
    Gathered gathered;
    {
      nb::gil_scoped_release released;
      gathered = lead.size() == 2 && lead[1] > 0
                     ? gather_windows(lanes, ring_->leaves(), ring_->columns(), ring_->reward(), fold_, ids,
                                      static_cast<size_t>(lead[0]), static_cast<size_t>(lead[1]), outputs)
                     : gather_transitions(lanes, ring_->leaves(), ring_->columns(), ring_->reward(), fold_, ids, count, outputs);
    }
    if (gathered == Gathered::kNotHeld) throw nb::index_error("a row is not held");
    if (gathered == Gathered::kOverrun) return nb::none();
    return nb::tuple(made);
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
  std::vector<std::vector<int64_t>> shapes_;
};

}  // namespace rlstore
