// Memory of outputs, which serves again once nobody uses it: new memory costs a page fault for every page.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace rlstore {

class OutputMemory;

// Some memory that is handed out, and how many use it.
struct Piece {
  char* memory;
  size_t bytes;
  std::atomic<int64_t> users;
  uint64_t returned;                    // in which period it was last given back
  std::shared_ptr<OutputMemory> owner;  // while it is handed out
};

// Pieces of memory, handed out and given back in any thread, with or without the GIL.
//
// A piece that comes back is kept for the next one who needs as much, the last one first: it may still be in the cache. No more
// than `keep_bytes` lie idle, and nothing lies idle longer than a period.
class OutputMemory : public std::enable_shared_from_this<OutputMemory> {
 public:
  explicit OutputMemory(size_t keep_bytes) : keep_bytes_(keep_bytes) {}
  ~OutputMemory();

  // At least so many bytes, at a multiple of 64, used by the caller alone. Throws std::bad_alloc.
  Piece* take(size_t bytes);

  // Begins a period: what was not used in the one before is freed.
  void begin();

  // What comes back from now on is freed, and so is all that lies idle.
  void close();

  size_t idle_bytes() const;

  static void share(Piece* piece) { piece->users.fetch_add(1, std::memory_order_relaxed); }
  static void release(Piece* piece);  // one user less

 private:
  void give_back(Piece* piece);
  void drop_older_than(uint64_t period, std::vector<Piece*>* dropped);

  std::unordered_map<size_t, std::vector<Piece*>> idle_;  // by their size
  size_t idle_bytes_ = 0, keep_bytes_;
  uint64_t period_ = 1;
};

}  // namespace rlstore
