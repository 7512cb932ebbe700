#include "outputs.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>

namespace rlstore {

namespace {

constexpr size_t kLine = 64, kHugePage = 2 << 20;

// One for all pools, held for a few instructions. A fork waits for it, so that no child is born with it taken.
std::mutex& pools() {
  static std::mutex* mutex = [] {
    static std::mutex made;
    pthread_atfork([] { made.lock(); }, [] { made.unlock(); }, [] { made.unlock(); });
    return &made;
  }();
  return *mutex;
}

// Rounded up to an eighth of its power of two, so that memory serves again if the next need differs a little.
size_t rounded(size_t bytes) {
  if (bytes > SIZE_MAX / 4) throw std::bad_alloc();
  size_t grain = kLine;
  while (grain * 16 <= bytes) grain *= 2;
  return std::max((bytes + grain - 1) / grain, size_t{1}) * grain;
}

// Large memory is in huge pages where the system has them: fewer page faults, and fewer misses when it is read.
char* allocate(size_t bytes) {
  if (bytes < kHugePage) {
    void* memory = std::aligned_alloc(kLine, bytes);
    if (!memory) throw std::bad_alloc();
    return static_cast<char*>(memory);
  }
  // One huge page more than needed, of which what is before the first boundary and behind the end is returned.
  const size_t mapped = bytes + kHugePage;
  void* place = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) throw std::bad_alloc();
  char* first = static_cast<char*>(place);
  char* memory = first + (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
  if (memory > first) munmap(first, static_cast<size_t>(memory - first));
  if (first + mapped > memory + bytes) munmap(memory + bytes, static_cast<size_t>(first + mapped - (memory + bytes)));
#if defined(MADV_HUGEPAGE)
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

void destroy(Piece* piece) {
  if (piece->bytes < kHugePage)
    std::free(piece->memory);
  else
    munmap(piece->memory, piece->bytes);
  delete piece;
}

}  // namespace

OutputMemory::~OutputMemory() { close(); }

Piece* OutputMemory::take(size_t bytes) {
  const size_t size = rounded(bytes);
  Piece* piece = nullptr;
  {
    const std::lock_guard<std::mutex> locked(pools());
    const auto found = idle_.find(size);
    if (found != idle_.end() && !found->second.empty()) {
      piece = found->second.back();
      found->second.pop_back();
      idle_bytes_ -= size;
    }
  }
  if (!piece) {
    std::unique_ptr<Piece> made(new Piece{nullptr, size, {0}, 0, nullptr});
    made->memory = allocate(size);
    piece = made.release();
  }
  piece->users.store(1, std::memory_order_relaxed);
  piece->owner = shared_from_this();
  return piece;
}

void OutputMemory::release(Piece* piece) {
  if (piece->users.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const std::shared_ptr<OutputMemory> owner = std::move(piece->owner);
  owner->give_back(piece);
}

void OutputMemory::give_back(Piece* piece) {
  {
    const std::lock_guard<std::mutex> locked(pools());
    if (idle_bytes_ + piece->bytes <= keep_bytes_) {
      piece->returned = period_;
      idle_[piece->bytes].push_back(piece);
      idle_bytes_ += piece->bytes;
      return;
    }
  }
  destroy(piece);
}

void OutputMemory::drop_older_than(uint64_t period, std::vector<Piece*>* dropped) {
  for (auto entry = idle_.begin(); entry != idle_.end();) {
    std::vector<Piece*>& pieces = entry->second;
    const auto kept = std::stable_partition(pieces.begin(), pieces.end(), [&](Piece* piece) { return piece->returned >= period; });
    for (auto piece = kept; piece != pieces.end(); ++piece) idle_bytes_ -= (*piece)->bytes;
    dropped->insert(dropped->end(), kept, pieces.end());
    pieces.erase(kept, pieces.end());
    entry = pieces.empty() ? idle_.erase(entry) : std::next(entry);
  }
}

void OutputMemory::begin() {
  std::vector<Piece*> dropped;
  {
    const std::lock_guard<std::mutex> locked(pools());
    drop_older_than(period_, &dropped);
    period_++;
  }
  for (Piece* piece : dropped) destroy(piece);
}

void OutputMemory::close() {
  std::vector<Piece*> dropped;
  {
    const std::lock_guard<std::mutex> locked(pools());
    keep_bytes_ = 0;
    drop_older_than(UINT64_MAX, &dropped);
  }
  for (Piece* piece : dropped) destroy(piece);
}

size_t OutputMemory::idle_bytes() const {
  const std::lock_guard<std::mutex> locked(pools());
  return idle_bytes_;
}

}  // namespace rlstore
