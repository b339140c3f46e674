// The master's side of master-worker mode: small frames, queued for many workers, sent by a thread of its own.
//
// A caller encodes each frame once, behind the last one, under a lock that is held for some tens of nanoseconds. Frames
// for one target that follow each other are a piece; a target's piece is queued, by reference, for each of its workers
// when a frame for another target comes, when the memory is used up, or when its time has come. So each worker gets
// its frames in the order of the program, whatever the targets were.
//
// No thread waits in a system call for a worker: sockets are written without blocking, and one that is full is left to
// poll() while the others' frames go out. A full one may be waiting for a worker whose frames are still here.
//
// Frames, in little-endian order and unaligned:
//
// clang-format off
//   call     u16 template (>= 16), u32 id of each input, u32 id of each output, values of the template's lengths
//   FREE     u16 0, u16 count, u32 id of each
//   MESSAGE  u16 1, u32 length, payload
//   LINE     u16 2, u32 line of the program that the calls behind it come from
//   ECHO     u16 3, u32 number: see inbox.h
// clang-format on
//
// allranks/remote/protocol/wire.py defines what the frames mean.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/sys.h"
#include "base/waiting.h"

namespace allranks {

// Made by sys::make_owned. Throws std::invalid_argument for what is not there, std::runtime_error when it is closed or
// in a forked child.
class Outbox {
 public:
  static constexpr uint16_t kFirstTemplate = 16;
  static constexpr size_t kMostBulk = size_t{1} << 30;  // pending for one worker

  // delay_ns: how long a frame may wait for others. limit_bytes: from how many on callers wait for a worker.
  Outbox(int64_t delay_ns, size_t chunk_bytes, size_t limit_bytes);
  ~Outbox() { close(); }
  Outbox(const Outbox&) = delete;

  // The sockets stay the caller's, who keeps them open until the worker is lost or replaced, or the outbox closed.
  int add(int fd);
  void replace(int worker, int fd);  // a new stream: what was pending is dropped
  void lose(int worker);             // what is pending and all that comes is dropped

  int target(std::vector<int> workers);
  bool within(int part, int whole);  // whether each worker of a target is one of another's

  // Gives each output an id. Waits while a worker of the target has too much pending.
  void call(int target, uint32_t line, uint16_t code, std::span<const uint32_t> inputs, std::span<uint32_t> outputs,
            std::span<const std::byte> values, Caller& caller);
  void reserve(int target, std::span<uint32_t> ids);
  // The id's last use has been queued: it is free for others behind the FREE that goes with the target's next frame.
  void free(int target, uint32_t id) noexcept;
  // With bulk set, the message does not count for the limit of the others: it waits only for kMostBulk bytes of its
  // kind, so a caller can leave a large tensor to a worker that is busy, and go on queueing calls for it.
  void put(int target, std::span<const std::byte> head, std::span<const std::byte> payload, bool bulk, Caller& caller);

  // Asks each worker of the target to send the number back when it has done all before, and flushes.
  void echo(int target, uint32_t number, Caller& caller);

  void flush(Caller& caller);  // writes what the sockets take

  size_t pending(int worker);
  uint64_t sent(int worker);  // to all that the worker has been
  int failure(int worker);    // errno, or 0
  size_t live();              // ids that are not free; also when closed, as calls()
  uint64_t calls();

  // Drops what is pending. In a forked child, whose parent goes on, nothing is done.
  void close() noexcept;

 private:
  using Memory = std::shared_ptr<std::byte[]>;
  struct Piece {
    Memory memory;
    size_t begin;
    size_t end;
    bool bulk = false;
  };
  struct Worker {
    int fd = -1;
    std::deque<Piece> queue;
    size_t pending = 0;    // bytes in the queue
    size_t bulk = 0;       // of these, bytes of bulk messages
    uint64_t sent = 0;     // bytes
    int64_t line = -1;     // that it has been told; -1: none
    int failure = 0;       // errno
    bool lost = false;     // by its owner's word
    bool full = false;     // its socket
    bool sending = false;  // a thread writes from its queue, without the lock
    Memory memory;         // of its own, while its socket is full, for short pieces
    size_t end = 0;        // of what is used of it
    Piece copy(const Piece& piece);
    void append(Piece piece);
    bool gone() const { return lost || failure != 0; }
  };
  struct Target {
    std::vector<int> workers;     // sorted
    std::vector<uint32_t> frees;  // ids that no frame has named yet
  };
  enum class Sleep { none, timed, idle };  // of the thread; idle: until it is rung for
  class Hold;

  void check() const;
  Worker& worker(int number);
  Target& existing(int number);

  // All with lock_ held.
  void wait_for_room(int target, bool bulk, Hold& hold, Caller& caller);
  std::byte* extend(int target, size_t bytes);
  void seal();
  void enqueue(int target, const Piece& piece);
  void tell_line(int target, uint32_t line);
  void tell_frees(int target);
  void sweep();  // seals all that was queued
  uint32_t take_id();
  void drop(Worker& worker, std::unique_lock<std::mutex>& lock);
  void send(std::unique_lock<std::mutex>& lock);
  void send_some(Worker& worker, std::unique_lock<std::mutex>& lock);

  void run();

  const int64_t delay_ns_;
  const size_t chunk_bytes_;
  const size_t limit_bytes_;
  const uint32_t forks_ = sys::forks();

  std::mutex lock_;
  std::condition_variable changed_;  // for waiters_: room, an end of sending, closed
  int waiters_ = 0;
  std::deque<Worker> workers_;  // that stay where they are: a sender refers to one without the lock
  std::vector<Target> targets_;
  std::vector<int> freeing_;  // targets that have frees, once each
  std::vector<uint32_t> spare_ids_;
  uint32_t ids_ = 0;  // given so far
  size_t live_ = 0;
  uint64_t calls_ = 0;

  // The memory that frames are written into, and the piece at its end that no worker's queue has yet.
  Memory memory_;
  size_t memory_bytes_ = 0;
  size_t begin_ = 0;
  size_t end_ = 0;
  int open_ = -1;      // the piece's target
  int64_t line_ = -1;  // that all of its workers have been told; -1: unknown

  bool has_room_ = false;  // the open target, for all that is known: nothing has become pending since it was looked
  bool queued_ = false;    // something that only sweep() sends
  bool urgent_ = false;    // something that the thread is to be woken for, though its time has not come
  bool closed_ = false;
  Sleep sleep_ = Sleep::none;
  sys::Fd bell_;
  std::thread thread_;
};

}  // namespace allranks
