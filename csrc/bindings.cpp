// The Python module: converts tensors to raw pointers. Only the files named bindings* depend on Python.
//
// Shapes and dtypes are checked by the callers in rlstore/engine; checks are repeated here where an error would cause an
// access outside of a tensor's memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <type_traits>
#include <optional>
#include <vector>

#include "bindings_draws.h"
#include "bindings_flags.h"
#include "bindings_gather.h"
#include "bindings_launch.h"
#include "bindings_lazy.h"
#include "bindings_outputs.h"
#include "bindings_pieces.h"
#include "bindings_reader.h"
#include "bindings_rollouts.h"
#include "bindings_row_launcher.h"
#include "bindings_slots.h"
#include "bindings_tensor.h"
#include "bindings_writer.h"
#include "checksum.h"
#include "rows.h"
#include "scan.h"
#include "segments.h"
#include "simd.h"
#include "writeback.h"

namespace nb = nanobind;
using namespace rlstore;

namespace {

// ---------------------------------------------------------------------------------------------------- checksums

constexpr Py_ssize_t kManyBytes = 1 << 20;  // 80 us: getting the GIL back may take milliseconds

// The checksum of a contiguous buffer.
template <uint32_t (*function)(const void*, size_t, uint32_t)>
uint32_t checksum(nb::handle buffer, uint32_t value) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto size = static_cast<size_t>(view.len);
  if (view.len < kManyBytes) {
    value = function(view.buf, size, value);
  } else {
    nb::gil_scoped_release released;
    value = function(view.buf, size, value);
  }
  PyBuffer_Release(&view);
  return value;
}

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

// The fields of some sources [steps, lanes, ...], without targets, and how many rows all of them have.
std::vector<GatherField> gather_fields(nb::tuple sources, int64_t* limit) {
  std::vector<GatherField> fields;
  *limit = INT64_MAX;
  for (nb::handle source : sources) {
    GatherField field{describe(source), {}, 0};
    if (field.source.ndim < 2) throw nb::value_error("gather: a source is [steps, lanes, ...]");
    field.width = element_count(field.source, 2);
    *limit = std::min(*limit, field.source.shape[0] * field.source.shape[1]);
    fields.push_back(field);
  }
  return fields;
}

// targets[k][i] = sources[k].flatten(0, 1)[rows[i]], for every field in one call.
void gather_rows_of(nb::tuple sources, nb::handle rows_tensor, nb::tuple targets, bool keeps_gil) {
  DLTensor rows_view = describe(rows_tensor);
  const size_t count = element_count(rows_view);
  const int64_t* rows = typed<int64_t>(rows_tensor, count);
  if (sources.size() != targets.size()) throw nb::value_error("gather: as many targets as sources");
  int64_t limit;
  std::vector<GatherField> fields = gather_fields(sources, &limit);
  for (size_t k = 0; k < fields.size(); k++) {
    fields[k].target = describe(targets[k]);
    if (element_count(fields[k].target) != count * fields[k].width || !convertible(fields[k].source.dtype, fields[k].target.dtype))
      throw nb::value_error("gather: a target does not fit its source");
  }
  if (!rows_in_range(rows, count, limit)) throw nb::index_error("gather: a row is out of range");
  std::optional<nb::gil_scoped_release> released;
  if (!keeps_gil) released.emplace();
  for (const GatherField& field : fields) gather_field(field, rows, count);
}

// The same into new tensors in the memory of a pool; those of `as_float` are converted to float32.
nb::list gather_into_pool(const OutputPool& pool, nb::tuple sources, nb::handle rows_tensor, nb::sequence as_float) {
  const size_t count = element_count(describe(rows_tensor));
  const int64_t* rows = typed<int64_t>(rows_tensor, count);
  if (nb::len(as_float) != sources.size()) throw nb::value_error("gather: a dtype for each source");
  int64_t limit;
  std::vector<GatherField> fields = gather_fields(sources, &limit);
  std::vector<Form> forms;
  for (size_t k = 0; k < fields.size(); k++) {
    const DLTensor& source = fields[k].source;
    Form form{nb::cast<bool>(as_float[k]) ? DLDataType{kFloat, 32, 1} : source.dtype, {static_cast<int64_t>(count)}};
    if (!convertible(source.dtype, form.dtype)) throw nb::value_error("gather: a dtype that is not converted");
    form.shape.insert(form.shape.end(), source.shape + 2, source.shape + source.ndim);
    forms.push_back(std::move(form));
  }
  if (!rows_in_range(rows, count, limit)) throw nb::index_error("gather: a row is out of range");
  nb::list made = pool.make(&forms);
  nb::gil_scoped_release released;
  for (size_t k = 0; k < fields.size(); k++) {
    fields[k].target.data = forms[k].memory;
    fields[k].target.dtype = forms[k].dtype;
    gather_field(fields[k], rows, count);
  }
  return made;
}

void gather(nb::tuple sources, nb::handle rows, nb::tuple targets) { gather_rows_of(sources, rows, targets, false); }

// The same, for few rows and a thread that is in a hurry: to get the GIL back from another one can take milliseconds.
void gather_at_once(nb::tuple sources, nb::handle rows, nb::tuple targets) { gather_rows_of(sources, rows, targets, true); }

// ---------------------------------------------------------------------------------------------------- draws

void draw_units(nb::handle generator, nb::handle units) {
  const size_t count = element_count(describe(units));
  int64_t* state = typed<int64_t>(generator, 2);
  double* out = typed<double>(units, count);
  for (size_t i = 0; i < count; i++) out[i] = random_unit(static_cast<uint64_t>(state[0]), static_cast<uint64_t>(state[1]) + i);
  advance(state, count);
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

// Calls body with a Rollout of float or double, by the dtype of the rewards.
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

// gae() and what follows from it for a storage: with `dones`, `terminated` flags every end, and those that `truncated` flags too
// were only cut off; with an epsilon the advantages are normalized, a single one to 0.
void fill_gae_binding(nb::handle rewards, nb::handle values, nb::handle last_values, nb::handle terminated, nb::handle truncated,
                      nb::handle final_values, bool dones, double gamma, double lam, nb::handle epsilon, nb::handle advantages,
                      nb::handle returns) {
  scan(rewards, values, last_values, terminated, truncated, final_values, [&](auto rollout) {
    using Real = std::remove_const_t<std::remove_pointer_t<decltype(rollout.rewards)>>;
    const size_t count = rollout.steps * rollout.lanes;
    Real *filled = output(rollout, advantages), *targets = output(rollout, returns);
    const double spread = epsilon.is_none() ? 0 : nb::cast<double>(epsilon);
    std::vector<uint8_t> ended;
    if (dones && rollout.truncated) {
      ended.resize(count);
      for (size_t i = 0; i < count; i++) ended[i] = rollout.terminated[i] && !rollout.truncated[i];
      rollout.terminated = ended.data();
    }
    gae<Real>(rollout, static_cast<Real>(gamma), static_cast<Real>(lam), filled, targets);
    if (epsilon.is_none()) return;
    if (count < 2)
      std::fill(filled, filled + count, Real(0));
    else
      normalize(filled, count, spread);
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
  if (element_count(x) < 2) throw nb::value_error("normalize: at least two entries");
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

// The steps, lanes and row bytes of a source [steps, lanes, ...].
struct LanesView {
  const char* source;
  char* target;
  size_t steps, lanes, row_bytes;
};

// All pairs of source and target; each target must have `rows(source)` rows with the size and dtype of its source.
template <typename Rows>
std::vector<LanesView> lanes_views(nb::tuple sources, nb::tuple targets, Rows rows) {
  if (sources.size() != targets.size()) throw nb::value_error("as many targets as sources");
  std::vector<LanesView> views;
  for (size_t k = 0; k < sources.size(); k++) {
    DLTensor source = describe(sources[k]), target = describe(targets[k]);
    if (source.ndim < 2) throw nb::value_error("a source is [steps, lanes, ...]");
    LanesView view{address(source), address(target), static_cast<size_t>(source.shape[0]), static_cast<size_t>(source.shape[1]),
                   element_count(source, 2) * element_bytes(source)};
    if (!(source.dtype == target.dtype) || element_count(target) * element_bytes(target) != rows(view) * view.row_bytes)
      throw nb::value_error("a target does not fit its source");
    views.push_back(view);
  }
  return views;
}

void pad_binding(nb::tuple sources, nb::handle lanes, nb::handle starts, nb::handle lengths, nb::tuple targets, nb::handle mask) {
  Segments segments = segments_view(lanes, starts, lengths);
  const DLTensor mask_view = describe(mask);
  if (mask_view.ndim != 2) throw nb::value_error("a mask is [steps, segments]");
  const size_t steps = static_cast<size_t>(mask_view.shape[0]);
  uint8_t* flags = typed<uint8_t>(mask, product(steps, segments.count));
  std::vector<LanesView> views = lanes_views(sources, targets, [&](const LanesView&) { return steps * segments.count; });
  for (const LanesView& view : views) check_segments(segments, view.steps, view.lanes);
  mask_segments(flags, segments, steps);
  for (const LanesView& view : views) pad_segments(view.target, view.source, segments, steps, view.lanes, view.row_bytes);
}

void copy_lanes_binding(nb::tuple sources, size_t first, size_t last, nb::tuple targets) {
  if (first > last) throw nb::index_error("lanes out of range");
  std::vector<LanesView> views = lanes_views(sources, targets, [&](const LanesView& view) {
    if (last > view.lanes) throw nb::index_error("lanes out of range");
    return view.steps * (last - first);
  });
  for (const LanesView& view : views) copy_lanes(view.target, view.source, view.steps, view.lanes, first, last, view.row_bytes);
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
  nb::set_leak_warnings(false);  // a storage may live until the interpreter exits
  load_exchange();
  load_lazy_place(nb::module_::import_("torch"));
  load_numpy();
  nb::class_<RowWriter>(m, "RowWriter")
      .def(nb::init<nb::sequence, nb::dict>(), nb::arg(), nb::arg("rules") = nb::dict())
      .def("write", &RowWriter::write);
  nb::class_<RowReader>(m, "RowReader").def(nb::init<nb::tuple, nb::tuple, nb::tuple>()).def("read", &RowReader::read);
  nb::class_<Cutter>(m, "Cutter")
      .def(nb::init<nb::object, nb::object, nb::sequence, nb::sequence>())
      .def("empty", &Cutter::empty)
      .def("empties", &Cutter::empties)
      .def("cut", &Cutter::cut)
      .def("tensors", &Cutter::tensors);
  nb::class_<Fixed>(m, "Fixed").def(nb::init<nb::tuple>()).def_prop_ro("arguments", &Fixed::arguments);
  fixed_type = reinterpret_cast<PyTypeObject*>(nb::type<Fixed>().ptr());
  nb::class_<BoundKernel>(m, "BoundKernel")
      .def(nb::init<uintptr_t, uintptr_t, uintptr_t, unsigned, unsigned, std::string, int32_t, int32_t>(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("device_type") = static_cast<int32_t>(kCuda))
      .def("launch", &BoundKernel::launch);
  nb::class_<RowLauncher>(m, "RowLauncher").def(nb::init<nb::sequence>()).def("write", &RowLauncher::write).def("bind", &RowLauncher::bind);
  nb::class_<Guard>(m, "Guard", nb::is_weak_referenceable(), nb::type_slots(guard_slots))
      .def(nb::init<>())
      .def("enter", &Guard::enter)
      .def("leave", &Guard::leave)
      .def("begin_read", [](nb::object guard) { return GuardRead(std::move(guard)); })
      .def("forget_waiting", &Guard::forget_waiting)
      .def("close", &Guard::close)
      .def_prop_ro("is_closed", &Guard::is_closed)
      .def_prop_ro("is_taken", &Guard::is_taken);
  nb::class_<GuardRead>(m, "GuardRead");
  nb::class_<GuardBlock>(m, "GuardBlock")
      .def(nb::init<nb::object, bool>())
      .def("__enter__", &GuardBlock::enter)
      .def("__exit__", &GuardBlock::exit);
  nb::class_<WithBlock>(m, "Block")
      .def(nb::init<nb::object>())
      .def("__enter__", &WithBlock::enter)
      .def("__exit__", &WithBlock::exit, nb::arg().none(), nb::arg().none(), nb::arg().none());
  nb::class_<EpisodeRing>(m, "EpisodeRing")
      .def(nb::init<int64_t, nb::tuple, nb::object, nb::tuple, nb::tuple, size_t, int, int64_t, nb::dict>(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("rules") = nb::dict())
      .def("set_tables", &EpisodeRing::set_tables)
      .def("write", &EpisodeRing::write)
      .def("write_steps", &EpisodeRing::write_steps)
      .def("append", &EpisodeRing::append)
      .def("write_held", &EpisodeRing::write_held)
      .def("allow", &EpisodeRing::allow)
      .def("repeated", &EpisodeRing::repeated)
      .def(
          "guard_with",
          [](EpisodeRing& ring, nb::object guard, nb::object steps, EpisodeRing* whole, WindowIndex* windows, Priorities* priorities) {
            int64_t* count = typed<int64_t>(steps, 1);
            // The caller keeps both as long as it appends: they refer to the ring, and references both ways would leak.
            ring.guard_with(guard, [steps, count, whole, windows, priorities] {
              ++*count;
              if (whole) whole->catch_up();
              if (windows) windows->follow();
              if (priorities && windows) priorities->follow_windows(*windows);
              if (priorities && !windows) priorities->follow();
            });
            return true;
          },
          nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none())
      .def("watch", &EpisodeRing::watch)
      .def("catch_up", &EpisodeRing::catch_up)
      .def("overrun", &EpisodeRing::overrun)
      .def("draw", &EpisodeRing::draw)
      .def("bounds", &EpisodeRing::bounds)
      .def("windows", &EpisodeRing::windows);
  nb::class_<ReplayGather>(m, "ReplayGather")
      .def(nb::init<nb::object, nb::tuple, int64_t, double>())
      .def("gather", &ReplayGather::gather, nb::arg(), nb::arg().none())
      .def("sample", &ReplayGather::sample)
      .def("sample_by_priority", &ReplayGather::sample_by_priority)
      .def("sample_windows", &ReplayGather::sample_windows, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg());
  nb::class_<WindowIndex>(m, "WindowIndex")
      .def(nb::init<nb::object, int64_t, int64_t, bool, nb::tuple>())
      .def("follow", &WindowIndex::follow)
      .def("rebuild", &WindowIndex::rebuild)
      .def("count", &WindowIndex::count)
      .def("draw", &WindowIndex::draw)
      .def("contains", &WindowIndex::contains)
      .def("keep_priorities", &WindowIndex::keep_priorities);
  nb::class_<Priorities>(m, "Priorities")
      .def(nb::init<nb::object, nb::tuple>())
      .def_static("level_sizes", &Priorities::level_sizes)
      .def("total", &Priorities::total)
      .def("rebuild", &Priorities::rebuild)
      .def("follow", &Priorities::follow)
      .def("begin", &Priorities::begin)
      .def("follow_windows", &Priorities::follow_windows)
      .def("draw", &Priorities::draw)
      .def("settle", &Priorities::settle)
      .def("dropped", &Priorities::dropped)
      .def("update", &Priorities::update, nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg().none());
  nb::class_<OutputPool>(m, "OutputPool")
      .def(nb::init<size_t>())
      .def("begin", &OutputPool::begin)
      .def("empty", &OutputPool::empty)
      .def("gather", &gather_into_pool)
      .def_prop_ro("idle_bytes", &OutputPool::idle_bytes);
  nb::class_<SlotTableObject>(m, "SlotTable")
      .def(nb::init<nb::object>())
      .def("take", &SlotTableObject::take)
      .def("give", &SlotTableObject::give)
      .def("reclaim", &SlotTableObject::reclaim)
      .def("wake_all", &SlotTableObject::wake_all);
  nb::class_<LimiterObject>(m, "Limiter")
      .def(nb::init<nb::object>())
      .def("acquire_insert", &LimiterObject::acquire_insert)
      .def("acquire_sample", &LimiterObject::acquire_sample)
      .def("wake_all", &LimiterObject::wake_all);
  m.def("is_in_memory", &is_in_memory);
  m.def("is_lazy", [](nb::handle tensor) { return is_lazy(tensor.ptr()); });
  m.def("asked_is_lazy", [](nb::handle tensor) { return asked_is_lazy(tensor.ptr()); });
  m.def("join_flags", &join_flags, nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg());
  m.def("count_readable", &count_readable, nb::arg().none(), nb::arg());
  m.def("kind_of", &kind_of);
  m.def("crc32", &checksum<crc32>, nb::arg(), nb::arg() = 0);
  m.def("crc32_by_tables", &checksum<crc32_by_tables>, nb::arg(), nb::arg() = 0);
  m.def("start_writeback", &start_writeback, nb::call_guard<nb::gil_scoped_release>());
  m.def("process_start", &process_start);
  m.def("instruction_set", &instruction_set);
  m.def("add_to_word", &add_to_word);
  m.def("exchange_word", &exchange_shared_word);
  m.def("event_count", &event_count);
  m.def("await_event", &await_event);
  m.def("make_event", &make_event);
  m.def("restore_tables", &restore_tables);
  m.def("draw_units", &draw_units);
  m.def("gather", &gather);
  m.def("gather_at_once", &gather_at_once);
  m.def("gather_slots", &gather_slots_binding);
  m.def("gae", &gae_binding, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg());
  m.def("fill_gae", &fill_gae_binding, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg().none(), nb::arg(), nb::arg());
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
  m.def("copy_lanes", &copy_lanes_binding);
  m.def("first_states", &first_states_binding);
}
