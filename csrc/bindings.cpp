// The only file that knows Python: tensors in, raw pointers out.
//
// Tensors are described through torch's DLPack exchange table (see dlpack.h). Shapes and dtypes are checked by the
// callers in rlstore/kernels/native.py and rlstore/engine; what is checked again here is only what would otherwise
// read or write outside a tensor's memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "dlpack.h"
#include "rows.h"
#include "scan.h"
#include "segments.h"

namespace nb = nanobind;
using namespace rlstore;

namespace {

const DLExchangeApi* exchange = nullptr;

void load_exchange() {
  nb::object capsule = nb::module_::import_("torch").attr("Tensor").attr("__dlpack_c_exchange_api__");
  exchange = static_cast<const DLExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!exchange) throw nb::python_error();
  if (exchange->header.version.major != 1) throw nb::import_error("rlstore needs a torch that speaks DLPack 1.x");
}

size_t element_bytes(const DLTensor& tensor) { return (tensor.dtype.bits * tensor.dtype.lanes + 7) / 8; }

size_t element_count(const DLTensor& tensor, int from = 0) {
  size_t count = 1;
  for (int i = from; i < tensor.ndim; i++) count *= static_cast<size_t>(tensor.shape[i]);
  return count;
}

bool is_contiguous(const DLTensor& tensor) {
  if (!tensor.strides || element_count(tensor) == 0) return true;
  int64_t expected = 1;
  for (int i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

char* address(const DLTensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

// A contiguous CPU tensor, or an exception.
DLTensor describe(nb::handle object) {
  DLTensor tensor;
  if (exchange->describe(object.ptr(), &tensor)) throw nb::python_error();
  if (tensor.device.type != kCpu) throw nb::value_error("a CPU kernel was given a tensor on another device");
  if (!is_contiguous(tensor)) throw nb::value_error("a kernel was given a tensor that is not contiguous");
  return tensor;
}

template <typename T>
T* typed(nb::handle object, size_t count) {
  DLTensor tensor = describe(object);
  const bool is_float = tensor.dtype.code == kFloat;
  if (is_float != std::is_floating_point_v<T> || element_bytes(tensor) != sizeof(T) || element_count(tensor) != count)
    throw nb::value_error("a kernel was given a tensor of the wrong size or dtype");
  return reinterpret_cast<T*>(address(tensor));
}

template <typename T>
T* typed_or_null(nb::handle object, size_t count) {
  return object.is_none() ? nullptr : typed<T>(object, count);
}

// ---------------------------------------------------------------------------------------------------- write

// One value of a row, found to fit: where it is and what it holds.
struct Source {
  const char* memory = nullptr;  // null: nothing to write
  DLDataType dtype{};
};

bool can_be_flag(const DLDataType& dtype) {
  if (dtype.lanes != 1) return false;
  if (dtype.code == kFloat) return dtype.bits == 32 || dtype.bits == 64;
  return dtype.bits == 8 || (dtype.code == kInt && (dtype.bits == 32 || dtype.bits == 64));
}

bool is_nan_free(const Source& source, size_t count) {
  if (source.dtype.code != kFloat) return true;
  if (source.dtype.bits == 32) return !has_nan(reinterpret_cast<const float*>(source.memory), count);
  return !has_nan(reinterpret_cast<const double*>(source.memory), count);
}

template <typename Target>
void write_flags(Target* target, const Source& source, size_t count) {
  const bool is_float = source.dtype.code == kFloat;
  switch (source.dtype.bits) {
    case 8: return copy_flags(target, reinterpret_cast<const uint8_t*>(source.memory), count);
    case 32:
      if (is_float) return copy_flags(target, reinterpret_cast<const float*>(source.memory), count);
      return copy_flags(target, reinterpret_cast<const int32_t*>(source.memory), count);
    default:
      if (is_float) return copy_flags(target, reinterpret_cast<const double*>(source.memory), count);
      return copy_flags(target, reinterpret_cast<const int64_t*>(source.memory), count);
  }
}

// Writes one time row into several blocks [rows, ...] at once: checks every value first, then copies, so a refused
// row leaves no trace. Shapes are bound once; addresses are asked for at every write, because a caller may move a
// block's memory (share_memory_(), set_data) under the same tensor.
class RowWriter {
 public:
  // Each target is (block, lead, is_flag, optional): a value given for row t goes to block[t + lead]. Every counter goes
  // up by one with each row that is written.
  RowWriter(nb::sequence targets, nb::object counters) : counters_(counters) {
    DLTensor described = describe(counters);
    counter_count_ = element_count(described);
    typed<int64_t>(counters, counter_count_);
    for (nb::handle item : targets) {
      nb::tuple target = nb::cast<nb::tuple>(item);
      if (target.size() != 4) throw nb::value_error("a target is (block, lead, is_flag, optional)");
      DLTensor block = describe(target[0]);
      Field field;
      field.block = nb::borrow(target[0]);
      field.dtype = block.dtype;
      field.shape.assign(block.shape + 1, block.shape + block.ndim);
      field.count = element_count(block, 1);
      field.bytes = field.count * element_bytes(block);
      field.rows = static_cast<size_t>(block.shape[0]);
      field.lead = nb::cast<size_t>(target[1]);
      field.is_flag = nb::cast<bool>(target[2]);
      field.optional = nb::cast<bool>(target[3]);
      if (field.is_flag && field.dtype.bits != 8 && !(field.dtype == DLDataType{kFloat, 32, 1}))
        throw nb::value_error("flags are held in bytes or in float32");
      fields_.push_back(field);
    }
    sources_.resize(fields_.size());
  }

  // Returns -1 when the row was written, else the index of the first value that does not fit as it is (nothing is
  // written then). None leaves an optional field's row as it was.
  int64_t write(size_t row, nb::tuple values) {
    if (values.size() != fields_.size()) throw nb::value_error("a row has one value for each field");
    for (size_t i = 0; i < fields_.size(); i++) {
      Field& field = fields_[i];
      DLTensor block = describe(field.block);
      if (element_count(block) * element_bytes(block) != field.bytes * field.rows)
        throw nb::value_error("a block has changed its size");
      field.base = address(block);
      PyObject* value = PyTuple_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i));
      sources_[i] = Source{};
      if (value == Py_None && field.optional) continue;
      if (row >= field.rows || field.lead >= field.rows - row) throw nb::index_error("a row beyond the end of its block");
      if (!find_source(value, field, &sources_[i])) return static_cast<int64_t>(i);
    }
    for (size_t i = 0; i < fields_.size(); i++) {
      if (!sources_[i].memory) continue;
      const Field& field = fields_[i];
      char* target = field.base + (row + field.lead) * field.bytes;
      if (!field.is_flag)
        memmove(target, sources_[i].memory, field.bytes);
      else if (field.dtype.bits == 8)
        write_flags(reinterpret_cast<uint8_t*>(target), sources_[i], field.count);
      else
        write_flags(reinterpret_cast<float*>(target), sources_[i], field.count);
    }
    int64_t* counters = typed<int64_t>(counters_, counter_count_);
    for (size_t i = 0; i < counter_count_; i++) counters[i]++;
    return -1;
  }

 private:
  struct Field {
    nb::object block;
    char* base = nullptr;
    DLDataType dtype;
    std::vector<int64_t> shape;  // of one time row
    size_t count, bytes, rows, lead;
    bool is_flag, optional;
  };

  // Where the value lies, if it can be copied as it is; false if it must be converted or refused.
  static bool find_source(PyObject* value, const Field& field, Source* found) {
    DLTensor tensor;
    if (exchange->describe(value, &tensor)) {
      PyErr_Clear();
      return false;
    }
    const bool type_fits = field.is_flag ? can_be_flag(tensor.dtype) : tensor.dtype == field.dtype;
    if (tensor.device.type != kCpu || !type_fits || !same_shape(tensor, field.shape) || !is_contiguous(tensor)) return false;
    // A lazily negated tensor looks like any other here; only a single element of one can be contiguous.
    if (field.count == 1 && nb::cast<bool>(nb::handle(value).attr("is_neg")())) return false;
    static const char empty = 0;  // a row of no bytes has no memory, and is still a row
    *found = Source{field.bytes ? address(tensor) : &empty, tensor.dtype};
    return !field.is_flag || is_nan_free(*found, field.count);
  }

  // Equal; or both are rows of scalars, (n,) or (n, 1).
  static bool same_shape(const DLTensor& tensor, const std::vector<int64_t>& shape) {
    const size_t given = static_cast<size_t>(tensor.ndim);
    if (is_scalar_row(tensor.shape, given) && is_scalar_row(shape.data(), shape.size())) return tensor.shape[0] == shape[0];
    return given == shape.size() && std::equal(shape.begin(), shape.end(), tensor.shape);
  }

  static bool is_scalar_row(const int64_t* shape, size_t ndim) { return ndim == 1 || (ndim == 2 && shape[1] == 1); }

  std::vector<Field> fields_;
  std::vector<Source> sources_;
  nb::object counters_;
  size_t counter_count_ = 0;
};

// ---------------------------------------------------------------------------------------------------- gather

// A source and its target, described while the GIL is held.
struct GatherField {
  DLTensor source, target;
  size_t width;  // elements in a row
};

void gather_field(const GatherField& field, const int64_t* rows, size_t count) {
  const char* source = address(field.source);
  char* target = address(field.target);
  const DLDataType from = field.source.dtype;
  if (from == field.target.dtype)
    return gather_rows(target, source, rows, count, field.width * element_bytes(field.source));
  const auto convert = [&](auto element) {
    gather_as_float(reinterpret_cast<float*>(target), reinterpret_cast<const decltype(element)*>(source), rows, count, field.width);
  };
  switch (from.code) {
    case kInt:
      return from.bits == 8 ? convert(int8_t{}) : from.bits == 16 ? convert(int16_t{}) : from.bits == 32 ? convert(int32_t{}) : convert(int64_t{});
    case kFloat: return from.bits == 16 ? convert(Half{}) : convert(double{});
    case kBfloat: return convert(BrainHalf{});
    default:
      return from.bits == 8 ? convert(uint8_t{}) : from.bits == 16 ? convert(uint16_t{}) : from.bits == 32 ? convert(uint32_t{}) : convert(uint64_t{});
  }
}

bool convertible(const DLDataType& from, const DLDataType& to) {
  if (from == to) return true;
  if (!(to == DLDataType{kFloat, 32, 1}) || from.lanes != 1) return false;
  switch (from.code) {
    case kInt:
    case kUInt: return from.bits == 8 || from.bits == 16 || from.bits == 32 || from.bits == 64;
    case kFloat: return from.bits == 16 || from.bits == 64;
    case kBfloat: return from.bits == 16;
    default: return from.code == kBool && from.bits == 8;
  }
}

// targets[k][i] = sources[k].flatten(0, 1)[rows[i]], for every field in one call.
void gather(nb::tuple sources, nb::handle rows_tensor, nb::tuple targets) {
  DLTensor rows_view = describe(rows_tensor);
  const size_t count = element_count(rows_view);
  const int64_t* rows = typed<int64_t>(rows_tensor, count);
  if (sources.size() != targets.size()) throw nb::value_error("gather: as many targets as sources");
  std::vector<GatherField> fields;
  int64_t limit = INT64_MAX;
  for (size_t k = 0; k < sources.size(); k++) {
    GatherField field{describe(sources[k]), describe(targets[k]), 0};
    if (field.source.ndim < 2) throw nb::value_error("gather: a source is [steps, lanes, ...]");
    field.width = element_count(field.source, 2);
    if (element_count(field.target) != count * field.width || !convertible(field.source.dtype, field.target.dtype))
      throw nb::value_error("gather: a target does not fit its source");
    limit = std::min(limit, field.source.shape[0] * field.source.shape[1]);
    fields.push_back(field);
  }
  nb::gil_scoped_release released;
  if (!rows_in_range(rows, count, limit)) throw nb::index_error("gather: a row is out of range");
  for (const GatherField& field : fields) gather_field(field, rows, count);
}

// ---------------------------------------------------------------------------------------------------- scans

template <typename Real>
Rollout<Real> make_rollout(const DLTensor& shape, nb::handle rewards, nb::handle values, nb::handle last_values,
                           nb::handle terminated, nb::handle truncated, nb::handle final_values) {
  Rollout<Real> rollout;
  rollout.steps = static_cast<size_t>(shape.shape[0]);
  rollout.lanes = element_count(shape, 1);
  const size_t count = rollout.steps * rollout.lanes;
  rollout.rewards = typed<Real>(rewards, count);
  rollout.values = typed_or_null<Real>(values, count);
  rollout.last_values = typed<Real>(last_values, rollout.lanes);
  rollout.terminated = typed<uint8_t>(terminated, count);
  rollout.truncated = typed_or_null<uint8_t>(truncated, count);
  rollout.final_values = typed_or_null<Real>(final_values, count);
  return rollout;
}

// Calls body with a Rollout of float or of double, as the rewards are.
template <typename Body>
void scan(nb::handle rewards, nb::handle values, nb::handle last_values, nb::handle terminated, nb::handle truncated,
          nb::handle final_values, Body body) {
  DLTensor shape = describe(rewards);
  if (shape.ndim < 2 || shape.dtype.code != kFloat) throw nb::value_error("rewards are float [steps, lanes]");
  if (shape.dtype.bits == 32)
    body(make_rollout<float>(shape, rewards, values, last_values, terminated, truncated, final_values));
  else if (shape.dtype.bits == 64)
    body(make_rollout<double>(shape, rewards, values, last_values, terminated, truncated, final_values));
  else
    throw nb::value_error("rewards are float32 or float64");
}

template <typename Real>
Real* output(const Rollout<Real>& rollout, nb::handle tensor) {
  return typed<Real>(tensor, rollout.steps * rollout.lanes);
}

void gae_binding(nb::handle rewards, nb::handle values, nb::handle last_values, nb::handle terminated, nb::handle truncated,
                 nb::handle final_values, double gamma, double lam, nb::handle advantages, nb::handle returns) {
  scan(rewards, values, last_values, terminated, truncated, final_values, [&](auto rollout) {
    using Real = std::remove_const_t<std::remove_pointer_t<decltype(rollout.rewards)>>;
    gae<Real>(rollout, static_cast<Real>(gamma), static_cast<Real>(lam), output(rollout, advantages), output(rollout, returns));
  });
}

void discounted_binding(nb::handle rewards, nb::handle last_values, nb::handle terminated, nb::handle truncated,
                        nb::handle final_values, double gamma, nb::handle returns) {
  scan(rewards, nb::none(), last_values, terminated, truncated, final_values, [&](auto rollout) {
    using Real = std::remove_const_t<std::remove_pointer_t<decltype(rollout.rewards)>>;
    discounted_returns<Real>(rollout, static_cast<Real>(gamma), output(rollout, returns));
  });
}

void n_step_binding(nb::handle rewards, nb::handle values, nb::handle last_values, nb::handle terminated, nb::handle truncated,
                    nb::handle final_values, double gamma, size_t n, nb::handle returns) {
  if (n < 1) throw nb::value_error("n_step_returns: n is at least 1");
  scan(rewards, values, last_values, terminated, truncated, final_values, [&](auto rollout) {
    using Real = std::remove_const_t<std::remove_pointer_t<decltype(rollout.rewards)>>;
    n_step_returns<Real>(rollout, static_cast<Real>(gamma), n, output(rollout, returns));
  });
}

void vtrace_binding(nb::handle rewards, nb::handle values, nb::handle last_values, nb::handle terminated, nb::handle truncated,
                    nb::handle final_values, nb::handle log_rhos, double gamma, double lam, double clip_rho, double clip_c,
                    double clip_pg_rho, nb::handle targets, nb::handle advantages) {
  scan(rewards, values, last_values, terminated, truncated, final_values, [&](auto rollout) {
    using Real = std::remove_const_t<std::remove_pointer_t<decltype(rollout.rewards)>>;
    VtraceClips<Real> clips{static_cast<Real>(clip_rho), static_cast<Real>(clip_c), static_cast<Real>(clip_pg_rho)};
    vtrace<Real>(rollout, output(rollout, log_rhos), static_cast<Real>(gamma), static_cast<Real>(lam), clips,
                 output(rollout, targets), output(rollout, advantages));
  });
}

void normalize_binding(nb::handle tensor, double epsilon) {
  DLTensor x = describe(tensor);
  if (x.dtype == DLDataType{kFloat, 32, 1})
    normalize(reinterpret_cast<float*>(address(x)), element_count(x), epsilon);
  else if (x.dtype == DLDataType{kFloat, 64, 1})
    normalize(reinterpret_cast<double*>(address(x)), element_count(x), epsilon);
  else
    throw nb::value_error("normalize: float32 or float64");
}

// ---------------------------------------------------------------------------------------------------- segments

struct DonesView {
  const uint8_t* flags;
  size_t steps, lanes;
};

DonesView dones_view(nb::handle tensor, size_t first, size_t last) {
  DLTensor dones = describe(tensor);
  if (dones.ndim < 2 || element_bytes(dones) != 1) throw nb::value_error("dones are one-byte flags [steps, lanes]");
  DonesView view{reinterpret_cast<const uint8_t*>(address(dones)), static_cast<size_t>(dones.shape[0]), element_count(dones, 1)};
  if (first > last || last > view.lanes) throw nb::index_error("lanes out of range");
  return view;
}

size_t count_binding(nb::handle dones, size_t first, size_t last) {
  DonesView view = dones_view(dones, first, last);
  return count_segments(view.flags, view.steps, view.lanes, first, last);
}

void split_binding(nb::handle dones, size_t first, size_t last, nb::handle lanes, nb::handle starts, nb::handle lengths) {
  DonesView view = dones_view(dones, first, last);
  size_t count = count_segments(view.flags, view.steps, view.lanes, first, last);
  split_segments(view.flags, view.steps, view.lanes, first, last, typed<int64_t>(lanes, count), typed<int64_t>(starts, count),
                 typed<int64_t>(lengths, count));
}

Segments segments_view(nb::handle lanes, nb::handle starts, nb::handle lengths) {
  size_t count = element_count(describe(lanes));
  return {count, typed<int64_t>(lanes, count), typed<int64_t>(starts, count), typed<int64_t>(lengths, count)};
}

void check_segments(const Segments& segments, size_t steps, size_t lanes) {
  for (size_t s = 0; s < segments.count; s++) {
    const int64_t lane = segments.lanes[s], start = segments.starts[s], length = segments.lengths[s];
    if (lane < 0 || lane >= static_cast<int64_t>(lanes) || start < 0 || length < 0 || length > static_cast<int64_t>(steps) ||
        start > static_cast<int64_t>(steps) - length)
      throw nb::index_error("a segment is out of range");
  }
}

void pad_binding(nb::tuple sources, nb::handle lanes, nb::handle starts, nb::handle lengths, nb::tuple targets, nb::handle mask) {
  Segments segments = segments_view(lanes, starts, lengths);
  if (sources.size() != targets.size()) throw nb::value_error("pad_segments: as many targets as sources");
  const size_t steps = static_cast<size_t>(describe(mask).shape[0]);
  mask_segments(typed<uint8_t>(mask, steps * segments.count), segments, steps);
  for (size_t k = 0; k < sources.size(); k++) {
    DLTensor source = describe(sources[k]), target = describe(targets[k]);
    const size_t row_bytes = element_count(source, 2) * element_bytes(source);
    if (element_count(target) * element_bytes(target) != steps * segments.count * row_bytes)
      throw nb::value_error("pad_segments: a target does not fit its source");
    check_segments(segments, static_cast<size_t>(source.shape[0]), static_cast<size_t>(source.shape[1]));
    pad_segments(address(target), address(source), segments, steps, static_cast<size_t>(source.shape[1]), row_bytes);
  }
}

void first_states_binding(nb::handle states_tensor, nb::handle lanes, nb::handle starts, nb::handle target_tensor) {
  const size_t count = element_count(describe(lanes));
  const int64_t *segment_lanes = typed<int64_t>(lanes, count), *segment_starts = typed<int64_t>(starts, count);
  DLTensor states = describe(states_tensor), target = describe(target_tensor);
  if (states.ndim != 4) throw nb::value_error("states are [steps, layers, lanes, hidden]");
  const size_t layers = static_cast<size_t>(states.shape[1]), state_lanes = static_cast<size_t>(states.shape[2]);
  const size_t state_bytes = element_count(states, 3) * element_bytes(states);
  if (element_count(target) * element_bytes(target) != layers * count * state_bytes)
    throw nb::value_error("first_states: the target does not fit");
  if (!rows_in_range(segment_lanes, count, states.shape[2]) || !rows_in_range(segment_starts, count, states.shape[0]))
    throw nb::index_error("a segment is out of range");
  first_states(address(target), address(states), segment_lanes, segment_starts, count, layers, state_lanes, state_bytes);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a storage may well live until the interpreter ends
  load_exchange();
  nb::class_<RowWriter>(m, "RowWriter").def(nb::init<nb::sequence, nb::object>()).def("write", &RowWriter::write);
  m.def("gather", &gather);
  m.def("gae", &gae_binding, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg());
  m.def("discounted_returns", &discounted_binding, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(),
        nb::arg());
  m.def("n_step_returns", &n_step_binding, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(),
        nb::arg(), nb::arg());
  m.def("vtrace", &vtrace_binding, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
  m.def("normalize", &normalize_binding);
  m.def("count_segments", &count_binding);
  m.def("split_segments", &split_binding);
  m.def("pad_segments", &pad_binding);
  m.def("first_states", &first_states_binding);
}
