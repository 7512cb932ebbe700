#include "processes.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <signal.h>
#include <unistd.h>
#endif

namespace rlstore {

#ifdef __linux__

void Event::wait(uint32_t seen, const Deadline& deadline) {
  const int64_t left = deadline.left();
  if (left == 0) return;
  timespec span{static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
  __atomic_add_fetch(&waiters, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &count, FUTEX_WAIT, seen, &span, nullptr, 0);
  __atomic_sub_fetch(&waiters, 1, __ATOMIC_SEQ_CST);
}

void Event::happen(int sleepers) {
  __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&waiters, __ATOMIC_SEQ_CST) != 0) syscall(SYS_futex, &count, FUTEX_WAKE, sleepers, nullptr, nullptr, 0);
}

int64_t process_start(int64_t pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
  FILE* file = fopen(path, "r");
  if (!file) return 0;
  const size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  // The second field is the command in parentheses, which may contain spaces and parentheses.
  const char* rest = strrchr(text, ')');
  if (!rest || strlen(rest) < 3) return 0;
  const char state = rest[2];
  if (state == 'Z' || state == 'X') return 0;
  rest += 2;
  for (int field = 3; field < 22 && rest; field++) rest = strchr(rest + 1, ' ');
  return rest ? strtoll(rest, nullptr, 10) : 0;
}

#else

void Event::wait(uint32_t seen, const Deadline& deadline) {
  if (deadline.left() > 0 && this->seen() == seen) usleep(1000);
}

void Event::happen(int) { __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST); }

int64_t process_start(int64_t pid) { return kill(static_cast<pid_t>(pid), 0) == 0; }

#endif

}  // namespace rlstore
