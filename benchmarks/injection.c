// Makes one system call of one process of a job fail. Preloaded into launcher and ranks (benchmarks/injection.py).
//
// INJECT is "role phase call n errno" or "log". The n-th call of this kind that a process of this role makes in this
// phase returns the error instead of being done; errno 0 stands for a short transfer: half of the bytes. With "log"
// nothing fails, and each call is a line of INJECT_LOG. What was injected is written to INJECT_DONE, which is made only
// once: of several processes with the same role the first one fails.
//
// The launcher leads the session of its job, and ranks have RANK. A rank says in which phase it is by
// access("/inject/PHASE", 0). Calls within libc itself are not seen here. Left out are memory of allocators and files that
// imports open: what Python and torch do then is theirs.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define KINDS 64
static struct {
  pid_t pid;
  char phase[32];
  char role[32];
  struct { char name[24]; int count; } kinds[KINDS];
} state;

static void *next(const char *name) {
  void *found = dlsym(RTLD_NEXT, name);
  return found;
}

static void look(void) {
  const pid_t pid = (pid_t)syscall(SYS_getpid);
  if (state.pid != pid) {  // a forked process counts anew
    memset(&state, 0, sizeof state);
    state.pid = pid;
    strcpy(state.phase, "before");
  }
  const char *rank = getenv("RANK");
  const char *start = getenv("ALLRANKS_START");
  if (rank != NULL && strcmp(state.phase, "before") != 0) {
    snprintf(state.role, sizeof state.role, "rank%.3s.%.3s", rank, start != NULL ? start : "0");
  } else {
    strcpy(state.role, (pid_t)syscall(SYS_getsid, 0) == pid ? "launcher" : "helper");
  }
}

static const char *subject = "";  // the path, for INJECT_DONE

// 0: do it; -1: a short transfer; else the error.
static int verdict(const char *call) {
  const int before = errno;
  const char *inject = getenv("INJECT");
  if (inject == NULL) return 0;
  look();
  int which = 0;
  while (which < KINDS - 1 && state.kinds[which].name[0] != 0 && strcmp(state.kinds[which].name, call) != 0) which++;
  if (state.kinds[which].name[0] == 0) strncpy(state.kinds[which].name, call, sizeof state.kinds[which].name - 1);
  const int count = ++state.kinds[which].count;
  char line[256];
  if (strcmp(inject, "log") == 0) {
    const int size = snprintf(line, sizeof line, "%s %s %s %d\n", state.role, state.phase, call, (int)state.pid);
    const long fd = syscall(SYS_openat, AT_FDCWD, getenv("INJECT_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) {
      syscall(SYS_write, fd, line, size);
      syscall(SYS_close, fd);
    }
    errno = before;
    return 0;
  }
  char role[32], phase[32], wanted[32];
  int n, error;
  errno = before;
  if (sscanf(inject, "%31s %31s %31s %d %d", role, phase, wanted, &n, &error) != 5) return 0;
  if (count != n || strcmp(wanted, call) != 0 || strcmp(role, state.role) != 0 || strcmp(phase, state.phase) != 0) {
    return 0;
  }
  const long fd = syscall(SYS_openat, AT_FDCWD, getenv("INJECT_DONE"), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  errno = before;
  if (fd < 0) return 0;
  const int size = snprintf(line, sizeof line, "%s %s %s %d: %d in process %d %.80s\n", role, phase, call, n, error,
                            (int)state.pid, subject);
  syscall(SYS_write, fd, line, size);
  syscall(SYS_close, fd);
  errno = before;
  return error == 0 ? -1 : error;
}

// Each call has the next one of its name, and returns `failed` where it is to fail.
#define FAIL(call, failed)                 \
  do {                                     \
    const int error = verdict(call);       \
    if (error > 0) {                       \
      errno = error;                       \
      return failed;                       \
    }                                      \
  } while (0)

int access(const char *path, int mode) {
  if (strncmp(path, "/inject/", 8) == 0) {
    look();
    snprintf(state.phase, sizeof state.phase, "%.30s", path + 8);
    memset(state.kinds, 0, sizeof state.kinds);
    return 0;
  }
  return ((int (*)(const char *, int))next("access"))(path, mode);
}

int socket(int domain, int type, int protocol) {
  FAIL("socket", -1);
  return ((int (*)(int, int, int))next("socket"))(domain, type, protocol);
}

int socketpair(int domain, int type, int protocol, int fds[2]) {
  FAIL("socketpair", -1);
  return ((int (*)(int, int, int, int *))next("socketpair"))(domain, type, protocol, fds);
}

int pipe2(int fds[2], int flags) {
  FAIL("pipe2", -1);
  return ((int (*)(int *, int))next("pipe2"))(fds, flags);
}

int eventfd(unsigned value, int flags) {
  FAIL("eventfd", -1);
  return ((int (*)(unsigned, int))next("eventfd"))(value, flags);
}

int bind(int fd, const struct sockaddr *address, socklen_t size) {
  FAIL("bind", -1);
  return ((int (*)(int, const struct sockaddr *, socklen_t))next("bind"))(fd, address, size);
}

int listen(int fd, int backlog) {
  FAIL("listen", -1);
  return ((int (*)(int, int))next("listen"))(fd, backlog);
}

int connect(int fd, const struct sockaddr *address, socklen_t size) {
  FAIL("connect", -1);
  return ((int (*)(int, const struct sockaddr *, socklen_t))next("connect"))(fd, address, size);
}

int accept(int fd, struct sockaddr *address, socklen_t *size) {
  FAIL("accept", -1);
  return ((int (*)(int, struct sockaddr *, socklen_t *))next("accept"))(fd, address, size);
}

int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags) {
  FAIL("accept", -1);
  return ((int (*)(int, struct sockaddr *, socklen_t *, int))next("accept4"))(fd, address, size, flags);
}

int memfd_create(const char *name, unsigned flags) {
  FAIL("memfd_create", -1);
  return ((int (*)(const char *, unsigned))next("memfd_create"))(name, flags);
}

int ftruncate(int fd, off_t size) {
  FAIL("ftruncate", -1);
  return ((int (*)(int, off_t))next("ftruncate"))(fd, size);
}

int ftruncate64(int fd, off64_t size) {
  FAIL("ftruncate", -1);
  return ((int (*)(int, off64_t))next("ftruncate64"))(fd, size);
}

int fallocate64(int fd, int mode, off64_t from, off64_t size) {
  FAIL("fallocate", -1);
  return ((int (*)(int, int, off64_t, off64_t))next("fallocate64"))(fd, mode, from, size);
}

int fallocate(int fd, int mode, off_t from, off_t size) {
  FAIL("fallocate", -1);
  return ((int (*)(int, int, off_t, off_t))next("fallocate"))(fd, mode, from, size);
}

int posix_fallocate64(int fd, off64_t from, off64_t size) {
  const int error = verdict("fallocate");
  if (error > 0) return error;
  return ((int (*)(int, off64_t, off64_t))next("posix_fallocate64"))(fd, from, size);
}

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t from) {
  if (fd >= 0 || (flags & MAP_SHARED)) FAIL("mmap", MAP_FAILED);  // others are those of allocators
  return ((void *(*)(void *, size_t, int, int, int, off_t))next("mmap"))(at, size, protection, flags, fd, from);
}

void *mmap64(void *at, size_t size, int protection, int flags, int fd, off64_t from) {
  if (fd >= 0 || (flags & MAP_SHARED)) FAIL("mmap", MAP_FAILED);
  return ((void *(*)(void *, size_t, int, int, int, off64_t))next("mmap64"))(at, size, protection, flags, fd, from);
}

// Whether a descriptor is that of a file on a disk: pipes and sockets have room, or make the caller wait.
static int on_disk(int fd) {
  struct stat found;
  return fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
}

// What cpuinfo reads, a part of torch, which crashes where that fails.
static int of_cpuinfo(const char *path) { return strncmp(path, "/sys/devices/system/cpu/", 24) == 0; }

static int reads_cpuinfo(int fd) {
  char link[32], path[64] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  return readlink(link, path, sizeof path - 1) > 0 && of_cpuinfo(path);
}

static int of_imports(const char *path) {
  const size_t size = strlen(path);
  const char *endings[] = {".py", ".pyc", ".so", ".pth", ".zip", ".cfg"};
  for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
    const size_t own = strlen(endings[i]);
    if (size >= own && strcmp(path + size - own, endings[i]) == 0) return 1;
  }
  return strstr(path, "/lib/python3") != NULL || of_cpuinfo(path);
}

#define OPEN(name)                                                               \
  int name(const char *path, int flags, ...) {                                   \
    va_list more;                                                                \
    va_start(more, flags);                                                       \
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0; \
    va_end(more);                                                                \
    subject = path;                                                              \
    if (!of_imports(path)) FAIL("open", -1);                                     \
    subject = "";                                                                \
    return ((int (*)(const char *, int, mode_t))next(#name))(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                          \
  int name(int folder, const char *path, int flags, ...) {                                    \
    va_list more;                                                                             \
    va_start(more, flags);                                                                    \
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0;              \
    va_end(more);                                                                             \
    subject = path;                                                                           \
    if (!of_imports(path)) FAIL("open", -1);                                                  \
    subject = "";                                                                             \
    return ((int (*)(int, const char *, int, mode_t))next(#name))(folder, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

int mkdir(const char *path, mode_t mode) {
  FAIL("mkdir", -1);
  return ((int (*)(const char *, mode_t))next("mkdir"))(path, mode);
}

int rename(const char *from, const char *to) {
  FAIL("rename", -1);
  return ((int (*)(const char *, const char *))next("rename"))(from, to);
}

int fsync(int fd) {
  FAIL("fsync", -1);
  return ((int (*)(int))next("fsync"))(fd);
}

int fdatasync(int fd) {
  FAIL("fsync", -1);
  return ((int (*)(int))next("fdatasync"))(fd);
}

pid_t fork(void) {
  FAIL("fork", -1);
  return ((pid_t(*)(void))next("fork"))();
}

int epoll_create1(int flags) {
  FAIL("epoll_create1", -1);
  return ((int (*)(int))next("epoll_create1"))(flags);
}

int epoll_ctl(int fd, int what, int other, struct epoll_event *event) {
  if (what != EPOLL_CTL_DEL) FAIL("epoll_ctl", -1);
  return ((int (*)(int, int, int, struct epoll_event *))next("epoll_ctl"))(fd, what, other, event);
}

int epoll_wait(int fd, struct epoll_event *events, int most, int timeout) {
  FAIL("epoll_wait", -1);
  return ((int (*)(int, struct epoll_event *, int, int))next("epoll_wait"))(fd, events, most, timeout);
}

#define HALF(call, size)                                      \
  do {                                                        \
    const int error = verdict(call);                          \
    if (error > 0) {                                          \
      errno = error;                                          \
      return -1;                                              \
    }                                                         \
    if (error < 0 && (size) > 1) (size) = (size) / 2;         \
  } while (0)

ssize_t write(int fd, const void *data, size_t size) {
  HALF(on_disk(fd) ? "write" : "write_pipe", size);
  return ((ssize_t(*)(int, const void *, size_t))next("write"))(fd, data, size);
}

ssize_t read(int fd, void *data, size_t size) {
  if (!reads_cpuinfo(fd)) HALF("read", size);
  return ((ssize_t(*)(int, void *, size_t))next("read"))(fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  HALF("write", size);
  return ((ssize_t(*)(int, const void *, size_t, off64_t))next("pwrite64"))(fd, data, size, at);
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
  HALF("send", size);
  return ((ssize_t(*)(int, const void *, size_t, int))next("send"))(fd, data, size, flags);
}

ssize_t recv(int fd, void *data, size_t size, int flags) {
  HALF("recv", size);
  return ((ssize_t(*)(int, void *, size_t, int))next("recv"))(fd, data, size, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  FAIL("sendmsg", -1);
  return ((ssize_t(*)(int, const struct msghdr *, int))next("sendmsg"))(fd, message, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
  FAIL("recvmsg", -1);
  return ((ssize_t(*)(int, struct msghdr *, int))next("recvmsg"))(fd, message, flags);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  FAIL("writev", -1);
  return ((ssize_t(*)(int, const struct iovec *, int))next("writev"))(fd, parts, count);
}

// Calls that libc has no function for, or programs do not use it.
long syscall(long number, ...) {
  static long (*real)(long, ...);
  if (real == NULL) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  va_list more;
  va_start(more, number);
  long given[6];
  for (int i = 0; i < 6; i++) given[i] = va_arg(more, long);
  va_end(more);
  if (number == SYS_pidfd_open) FAIL("pidfd_open", -1);
  if (number == SYS_memfd_create) FAIL("memfd_create", -1);
  return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
