#include "base/sys.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>

#include "base/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace allranks::sys {

namespace {

[[noreturn]] void fail(const std::string& what) { throw Error(what + ": " + std::strerror(errno)); }

}  // namespace

int64_t now_ns() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec;
}

bool futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns) {
  const timespec ts{.tv_sec = timeout_ns / 1'000'000'000, .tv_nsec = timeout_ns % 1'000'000'000};
  // Without FUTEX_PRIVATE_FLAG, because several processes share the word.
  const long rc = syscall(SYS_futex, &word, FUTEX_WAIT, expected, &ts, nullptr, 0);
  // EINTR counts as a timeout, so that the caller checks for signals.
  return !(rc == -1 && (errno == ETIMEDOUT || errno == EINTR));
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

Fd::Fd(int fd) : fd_(fd) {
  if (fd >= 0) own_descriptor(fd);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    forks_ = other.forks_;
  }
  return *this;
}

int Fd::release() {
  if (fd_ >= 0 && forks_ == forks()) disown_descriptor(fd_);
  return std::exchange(fd_, -1);
}

void Fd::reset() {
  if (fd_ >= 0 && forks_ == forks()) close_descriptor(fd_);
  fd_ = -1;
}

bool hung_up(int socket) {
  pollfd p{.fd = socket, .events = POLLIN | POLLRDHUP, .revents = 0};
  // No process writes into a liveness socket, so "readable" means "closed".
  return poll(&p, 1, 0) == 1 && (p.revents & (POLLIN | POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

Fd sealed_memory(const std::string& name, size_t bytes) {
  constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Fd fd(memfd_create(name.c_str(), flags | MFD_NOEXEC_SEAL));
  if (fd.get() < 0 && errno == EINVAL) fd = Fd(memfd_create(name.c_str(), flags));  // Linux before 6.3
  if (fd.get() < 0) fail("memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) fail("ftruncate of shared memory");
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("F_ADD_SEALS");
  return fd;
}

void allocate(const Fd& memory, size_t bytes) {
  // In parts, because a signal undoes the allocation of the current part. If all bytes were one part, a periodic timer
  // signal could undo each attempt, and the loop would never end.
  constexpr size_t kPart = 1 << 20;
  for (size_t begin = 0; begin < bytes;) {
    const size_t part = std::min(kPart, bytes - begin);
    const int rc = posix_fallocate(memory.get(), static_cast<off_t>(begin), static_cast<off_t>(part));
    if (rc == EINTR) continue;
    if (rc != 0) {
      errno = rc;
      fail("cannot allocate " + std::to_string(bytes) + " bytes of shared memory");
    }
    begin += part;
  }
}

bool allocate_mapped(std::byte* begin, size_t bytes) {
  while (madvise(begin, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINVAL) return false;  // Linux before 5.14
    if (errno != EINTR && errno != EAGAIN) throw std::bad_alloc();
  }
  return true;
}

void leave_signals() noexcept {
  sigset_t set;
  sigfillset(&set);
  // Faults stay unblocked: the kernel kills a process without running its handlers if the faulting thread blocks them.
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&set, fault);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

void wake_on_time() noexcept { prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0); }  // 1 ns

Mapping::Mapping(const Fd& fd, size_t bytes, bool inherited, bool populated) : bytes_(bytes), inherited_(inherited) {
  struct stat st;
  if (fstat(fd.get(), &st) != 0) fail("fstat of a shared segment");
  if (static_cast<size_t>(st.st_size) != bytes) {
    throw Error("a shared segment has " + std::to_string(st.st_size) + " bytes, expected " + std::to_string(bytes) +
                ". Install the same version of allranks for all ranks");
  }
  const int flags = MAP_SHARED | (populated ? MAP_POPULATE : 0);
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd.get(), 0);
  if (p == MAP_FAILED) fail("mmap of a shared segment");
  data_ = static_cast<std::byte*>(p);
  // A forked child must not write into a segment (forks.h).
  if (!inherited && madvise(p, bytes, MADV_DONTFORK) != 0) {
    const int refused = errno;
    munmap(p, bytes);
    errno = refused;
    fail("madvise of a shared segment");
  }
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(inherited_, other.inherited_);
  std::swap(forks_, other.forks_);
  return *this;
}

Mapping::~Mapping() {
  // In a forked child that did not inherit the mapping, another mapping may be at this address.
  if (data_ != nullptr && (inherited_ || forks_ == forks())) munmap(data_, bytes_);
}

}  // namespace allranks::sys
