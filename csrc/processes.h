// What processes of one machine need to work together: waiting on a word of shared memory, and whether another one lives.
#pragma once

#include <chrono>
#include <cstdint>

namespace rlstore {

// A point in time until which to wait.
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

// Something that processes wait for, in shared memory; all zero at first.
struct Event {
  uint32_t count;    // times that it happened; written by whoever makes it happen, with release order
  uint32_t waiters;  // processes that wait now (too many if some were killed: that costs a system call, nothing else)

  uint32_t seen() const { return __atomic_load_n(&count, __ATOMIC_ACQUIRE); }
  // Returns when the event has happened since `seen`, or when the deadline has passed, or now and then for no reason.
  void wait(uint32_t seen, const Deadline& deadline);
  // It has happened: wakes `sleepers` of those that wait.
  void happen(int sleepers);
};

// When a process began, in ticks since the machine did: with its number this names it for good. 0 if it is gone, or
// dead and only not yet noticed by its parent.
int64_t process_start(int64_t pid);

}  // namespace rlstore
