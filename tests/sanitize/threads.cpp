// What processes share without a lock, in the threads of one process, for ThreadSanitizer: every access of one thread to what
// another one wrote must be ordered by the atomic words of csrc. `make sanitize` compiles and runs it.
//
// Not here: rows that a writer overwrites while they are gathered. That is a race by design: the gather notices it and is done
// again.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>
#include <vector>

#include "../../csrc/episodes.h"
#include "../../csrc/limiter.h"
#include "../../csrc/replay.h"
#include "../../csrc/slots.h"

using namespace rlstore;

namespace {

constexpr double kSeconds = 60;  // for a wait that should be short

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

template <typename Body>
void run_threads(size_t count, Body body) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; i++) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

// Three writers fill slots with numbers, two readers add them up.
void hand_off_slots() {
  constexpr size_t kSlots = 4, kWidth = 32, kWriters = 3, kReaders = 2, kEach = 4000, kTaken = kWriters * kEach / kReaders;
  std::vector<uint64_t> words(kSlots, 0), memory(kSlots * kWidth, 0);
  uint64_t ticket = 0, done[2] = {0, 0};
  Event events[4] = {};
  SlotTable table(words.data(), kSlots, &ticket, events, done);
  std::vector<uint64_t> sums(kReaders, 0);
  run_threads(kWriters + kReaders, [&](size_t thread) {
    const uint64_t owner = thread + 1;
    if (thread < kWriters) {
      for (size_t i = 0; i < kEach; i++) {
        const int64_t slot = table.take(SlotState::kFree, SlotState::kWriting, owner, Deadline(kSeconds));
        require(slot >= 0, "no slot became free");
        for (size_t k = 0; k < kWidth; k++) memory[static_cast<size_t>(slot) * kWidth + k] = thread * kEach + i;
        require(table.give(slot, SlotState::kWriting, SlotState::kFull, owner), "a slot was lost");
      }
      return;
    }
    for (size_t i = 0; i < kTaken; i++) {
      const int64_t slot = table.take(SlotState::kFull, SlotState::kReading, owner, Deadline(kSeconds));
      require(slot >= 0, "no slot became full");
      const uint64_t* held = memory.data() + static_cast<size_t>(slot) * kWidth;
      for (size_t k = 1; k < kWidth; k++) require(held[k] == held[0], "a slot holds two rollouts");
      sums[thread - kWriters] += held[0];
      require(table.give(slot, SlotState::kReading, SlotState::kFree, owner), "a slot was lost");
    }
  });
  const uint64_t count = kWriters * kEach;
  require(sums[0] + sums[1] == count * (count - 1) / 2, "a rollout was read twice, or never");
  require(done[0] == count && done[1] == count, "hand-offs were counted wrongly");
}

// Two threads insert and two sample, one sample for each insert, up to 30 inserts ahead or 10 behind.
void limit_rates() {
  constexpr int64_t kEach = 4000, kLeast = 10, kTolerance = 20;
  int64_t counts[2] = {0, 0};
  double rule[4] = {1, 1, kLeast, kTolerance};
  Event events[2] = {};
  Limiter limiter(counts, rule, events);
  const auto count_of = [&](Limiter::Count side) { return __atomic_load_n(counts + side, __ATOMIC_ACQUIRE); };
  run_threads(4, [&](size_t thread) {
    for (int64_t i = 0; i < kEach; i++) {
      require(limiter.acquire(thread < 2 ? Limiter::kInserted : Limiter::kSampled, 1, Deadline(kSeconds)), "a side was stopped");
      // The second count of each pair may have grown since.
      const int64_t inserted = count_of(Limiter::kInserted), sampled = count_of(Limiter::kSampled);
      require(inserted - sampled <= kLeast + kTolerance, "inserts are too far ahead");
      require(sampled - count_of(Limiter::kInserted) <= kTolerance - kLeast, "samples are too far ahead");
    }
  });
  require(counts[0] == 2 * kEach && counts[1] == 2 * kEach, "counts were lost");
}

// The memory of a ring of stacks of two frames with one number each, larger than what is written: nothing is overwritten.
struct Ring {
  static constexpr int64_t kLanes = 2, kSteps = 400, kRows = kSteps + 2, kSlots = 2 * kSteps;
  std::vector<int64_t> counters = std::vector<int64_t>(5 * kLanes, 0);
  std::vector<int32_t> episode_of = std::vector<int32_t>(kLanes * kRows, 0), free_slots = std::vector<int32_t>(kSlots);
  std::vector<float> frames = std::vector<float>(kLanes * kRows, 0), rewards = frames, finals = std::vector<float>(kSlots, 0), starts = finals;
  std::vector<Episode> episodes = std::vector<Episode>(kSlots);

  Ring() {
    std::iota(free_slots.begin(), free_slots.end(), 0);
    for (int64_t lane = 0; lane < kLanes; lane++)
      counters[2 * kLanes + lane] = counters[3 * kLanes + lane] = -1, counters[4 * kLanes + lane] = kSlots / kLanes;
  }

  Lanes lanes() {
    Lanes lanes;
    lanes.lanes = lanes.table_lanes = kLanes, lanes.steps = kSteps, lanes.rows = kRows, lanes.kept = kSteps, lanes.slots = kSlots;
    lanes.by_lanes = Divider(kLanes), lanes.by_rows = Divider(kRows), lanes.by_steps = Divider(kSteps);
    int64_t** bound[] = {&lanes.written, &lanes.begun, &lanes.current, &lanes.after_end, &lanes.free_count};
    for (int64_t i = 0; i < 5; i++) *bound[i] = counters.data() + i * kLanes;
    lanes.episodes = episodes.data(), lanes.free_slots = free_slots.data();
    lanes.episode_of = reinterpret_cast<char*>(episode_of.data()), lanes.lane_stride = kRows * 4, lanes.row_stride = 4;
    return lanes;
  }
  Block block(std::vector<float>* memory) const {
    return Block{reinterpret_cast<char*>(memory->data()), kRows * 4, 4, 4, DLDataType{kFloat, 32, 1}};
  }
  std::vector<Observation> leaves() {
    Observation leaf;
    leaf.block = block(&frames), leaf.finals = reinterpret_cast<char*>(finals.data()), leaf.starts = reinterpret_cast<char*>(starts.data());
    leaf.stack = 2, leaf.inner = 4;
    return {leaf};
  }
};

// Episodes of 7 steps; the frame at time t is t, the one after it t + 1, the reward 10 t.
void write_lanes(Ring* ring) {
  const Lanes lanes = ring->lanes();
  const std::vector<Observation> leaves = ring->leaves();
  const std::vector<Block> columns = {ring->block(&ring->rewards)};
  for (int64_t t = 0; t < Ring::kSteps; t++) {
    const float time = static_cast<float>(t), before = t % 7 ? time - 1 : time;  // a first stack repeats its frame
    const float now[] = {before, time, before, time}, next[] = {time, time + 1, time, time + 1}, reward[] = {10 * time, 10 * time};
    const uint8_t ended[] = {t % 7 == 6, t % 7 == 6}, no[] = {0, 0};
    Step step;
    step.observations = {reinterpret_cast<const char*>(now)}, step.next_observations = {reinterpret_cast<const char*>(next)};
    step.columns = {reinterpret_cast<const char*>(reward)}, step.rewards = reward, step.terminated = ended, step.truncated = no;
    Move moves[Ring::kLanes];
    require(plan_step(lanes, leaves, step, ResetSteps::kNever, moves) == Need::kNothing, "a step needs memory");
    require(!write_step(lanes, leaves, columns, step, ResetSteps::kNever, moves).has_broken, "an episode was broken");
  }
}

// Gathers everything but the newest row, whose next observation the writer is about to write again.
void read_lanes(Ring* ring) {
  Lanes lanes = ring->lanes();
  std::vector<int64_t> written(Ring::kLanes, 0), rows;
  lanes.written_now = lanes.written, lanes.written = written.data();
  const std::vector<Observation> leaves = ring->leaves();
  const std::vector<Block> columns = {ring->block(&ring->rewards)};
  const Fold fold{1, {1.0f, 0.9f}};
  while (written[0] < Ring::kSteps) {
    for (int64_t lane = 0; lane < Ring::kLanes; lane++) written[lane] = __atomic_load_n(lanes.written_now + lane, __ATOMIC_ACQUIRE);
    rows.clear();
    for (int64_t lane = 0; lane < Ring::kLanes; lane++)
      for (int64_t time = written[lane] > 40 ? written[lane] - 40 : 0; time + 1 < written[lane]; time++) rows.push_back(time * Ring::kLanes + lane);
    std::vector<float> now(rows.size() * 2), next = now, rewards(rows.size());
    std::vector<char> terminated(rows.size());
    std::vector<Output> outputs = {{Part::kObservation}, {Part::kNext}, {Part::kRewards}, {Part::kTerminated}};
    outputs[0].memory = reinterpret_cast<char*>(now.data()), outputs[1].memory = reinterpret_cast<char*>(next.data());
    outputs[2].memory = reinterpret_cast<char*>(rewards.data()), outputs[3].memory = terminated.data();
    const size_t bytes[] = {2 * sizeof(float), 2 * sizeof(float), sizeof(float), 1};
    for (size_t i = 0; i < 4; i++) outputs[i].bytes = bytes[i];
    require(gather_transitions(lanes, leaves, columns, 0, fold, rows.data(), rows.size(), outputs) != Gathered::kNotHeld, "rows are not held");
    for (size_t i = 0; i < rows.size(); i++) {
      const float time = static_cast<float>(rows[i] / Ring::kLanes);
      const bool first = rows[i] / Ring::kLanes % 7 == 0, last = rows[i] / Ring::kLanes % 7 == 6;
      require(now[2 * i + 1] == time && now[2 * i] == (first ? time : time - 1), "another observation");
      require(next[2 * i] == time && next[2 * i + 1] == time + 1, "another next observation");
      require(rewards[i] == 10 * time && (terminated[i] != 0) == last, "another reward or end");
    }
  }
}

void write_and_read_lanes() {
  Ring ring;
  run_threads(3, [&](size_t thread) { thread == 0 ? write_lanes(&ring) : read_lanes(&ring); });
}

}  // namespace

int main() {
  hand_off_slots();
  limit_rates();
  write_and_read_lanes();
  std::puts("slots, limiter and lanes: no data race");
}
