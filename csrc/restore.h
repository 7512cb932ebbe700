// Restores the tables of a ring that come from a disk, and refuses tables that would make an access out of bounds.
#pragma once

#include <cstdint>

#include "episodes.h"

namespace rlstore {

// The first thing that cannot be.
enum class Fault : int64_t {
  kNone = 0,
  kCounts = 1,        // a lane has written fewer rows than none, or more than can be
  kEpisodeIndex = 2,  // the episode index of a row is not one of its lane
  kEpisode = 3,       // the table of episodes does not have a row's episode where the row is
  kPadding = 4,       // the older frames of an episode's first stack are of no known kind, or there is no table of them
  kAfterEnd = 5,      // a reset step is awaited after an episode that has not just ended
};

struct Finding {
  Fault fault;
  int64_t lane, time;
};

// Checks all lanes: counts, the episode of each of the newest `lanes.kept` rows, and what a write looks at. Nothing else is
// trusted: open episodes and free slots are derived from the rows. If the process was killed in the middle of a write, the
// episode that it was about to end is open again, and the oldest row, which it may have overwritten in part, is dropped.
Finding restore_lanes(const Lanes& lanes, bool has_starts);

}  // namespace rlstore
