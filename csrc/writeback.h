// Writing files to the disk.
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>

#include <cstdint>

namespace rlstore {

// Lets the system begin to write a part of a file to the disk, without a wait: a later fsync finds little left to do.
inline void start_writeback([[maybe_unused]] int descriptor, [[maybe_unused]] int64_t offset, [[maybe_unused]] int64_t size) {
#ifdef __linux__
  sync_file_range(descriptor, offset, size, SYNC_FILE_RANGE_WRITE);
#endif
}

}  // namespace rlstore
