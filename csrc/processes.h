// Process synchronization on one machine: waiting on a word of shared memory, and detecting dead processes.
#pragma once

#include <chrono>
#include <cstdint>

namespace rlstore {

// The point in time at which a wait ends.
class Deadline {
 public:
  explicit Deadline(double seconds)
      : end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}
  // Nanoseconds left; 0 when it has passed.
  int64_t left() const {
    const auto rest = std::chrono::duration_cast<std::chrono::nanoseconds>(end_ - Clock::now()).count();
    return rest > 0 ? rest : 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point end_;
};

// An event in shared memory that processes wait for; initially zero.
struct Event {
  uint32_t count;    // times that it was signalled; incremented by the signalling process, with release order
  uint32_t waiters;  // waiting processes (too many if some were killed, which only costs a system call)

  uint32_t seen() const { return __atomic_load_n(&count, __ATOMIC_ACQUIRE); }
  // Returns when the event was signalled since `seen`, or when the deadline has passed; may also wake up spuriously.
  void wait(uint32_t seen, const Deadline& deadline);
  // Signals the event and wakes `sleepers` of the waiting processes.
  void happen(int sleepers);
};

// The start time of a process, in ticks since boot: together with the pid it identifies the process uniquely. 0 if the
// process is gone, or is a zombie.
int64_t process_start(int64_t pid);

}  // namespace rlstore
