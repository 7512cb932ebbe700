#include "restore.h"

#include <algorithm>
#include <vector>

namespace rlstore {

namespace {

// Row ids stay far below the limit for as long as a program can run.
constexpr int64_t kMostRows = int64_t{1} << 48;

bool counts_can_be(const Lanes& lanes, int64_t lane) {
  return lanes.begun[lane] >= 0 && lanes.written[lane] >= lanes.begun[lane] && lanes.written[lane] <= kMostRows / lanes.lanes;
}

// Checks the episode that begins at, or for the oldest row before, `time`; returns one past its last row.
Fault check_episode(const Lanes& lanes, int64_t lane, int64_t time, bool is_oldest, bool has_starts, std::vector<bool>* taken, int64_t* stop) {
  const int64_t slot = lanes.slot_at(lane, lanes.by_rows.remainder(time)), written = lanes.written[lane];
  if (!lanes.has_slot(slot) || slot % lanes.lanes != lane) return Fault::kEpisodeIndex;
  const Episode& episode = lanes.episodes[slot];
  *stop = lanes.stop_of(episode, lane);
  const bool begins_here = is_oldest ? episode.start >= 0 && episode.start <= time : episode.start == time;
  const bool is_over = episode.stop == *stop;
  if (!begins_here || *stop <= time || (*taken)[static_cast<size_t>(slot)] || (is_over && (episode.end < 0 || episode.end > (kTerminated | kTruncated))))
    return Fault::kEpisode;
  if (episode.padding > kKept || episode.padding < kZeros || (episode.padding == kKept && !has_starts)) return Fault::kPadding;
  for (int64_t t = time + 1; t < *stop; t++)
    if (lanes.slot_at(lane, lanes.by_rows.remainder(t)) != slot) return Fault::kEpisode;
  (*taken)[static_cast<size_t>(slot)] = true;
  if (*stop == written && !is_over) lanes.episodes[slot].stop = -1, lanes.episodes[slot].end = 0;
  return Fault::kNone;
}

void free_all_but(const Lanes& lanes, int64_t lane, const std::vector<bool>& taken) {
  int64_t count = 0;
  // The slot on top of the stack is the first to be taken: the lowest.
  for (int64_t slot = lanes.slots - lanes.lanes + lane; slot >= 0; slot -= lanes.lanes)
    if (!taken[static_cast<size_t>(slot)]) lanes.free_slot(lane, count++) = static_cast<int32_t>(slot);
  lanes.free_count[lane] = count;
}

Finding restore_lane(const Lanes& lanes, int64_t lane, bool has_starts, std::vector<bool>* taken) {
  if (!counts_can_be(lanes, lane)) return {Fault::kCounts, lane, 0};
  const int64_t written = lanes.written[lane];
  if (lanes.current[lane] == kWriting) lanes.begun[lane] = std::max(lanes.begun[lane], written - lanes.kept + 1);
  const int64_t oldest = std::max(lanes.begun[lane], written - lanes.kept);
  for (int64_t time = oldest, stop; time < written; time = stop) {
    const Fault fault = check_episode(lanes, lane, time, time == oldest, has_starts, taken, &stop);
    if (fault != Fault::kNone) return {fault, lane, time};
  }
  const int64_t newest = oldest < written ? lanes.slot_at(lane, lanes.by_rows.remainder(written - 1)) : -1;
  const bool is_open = newest >= 0 && lanes.episodes[newest].stop < 0;
  const int64_t ended = lanes.after_end[lane];
  if (ended < kResumed || (ended >= 0 && (ended != newest || is_open))) return {Fault::kAfterEnd, lane, written - 1};
  lanes.current[lane] = is_open ? newest : -1;
  free_all_but(lanes, lane, *taken);
  return {Fault::kNone, lane, 0};
}

}  // namespace

Finding restore_lanes(const Lanes& lanes, bool has_starts) {
  std::vector<bool> taken(static_cast<size_t>(lanes.slots));
  Finding found{Fault::kNone, 0, 0};
  for (int64_t lane = 0; lane < lanes.lanes && found.fault == Fault::kNone; lane++) found = restore_lane(lanes, lane, has_starts, &taken);
  return found;
}

}  // namespace rlstore
