// The master's side of master-worker mode: queues small frames for many workers. The outbox's thread sends them.
//
// A caller encodes each frame once, directly after the previous frame, under a lock that is held for some tens of
// nanoseconds. Consecutive frames for one target form a piece. A piece is queued, by reference, for each worker of its
// target. This happens when a frame for another target is added, when the chunk of memory is full, or after the delay.
// So each worker receives its frames in the order of the program, for any sequence of targets.
//
// No thread blocks in a system call for one worker: sockets are written without blocking. The thread polls a full
// socket while it sends the frames of other workers. This prevents a deadlock: the worker with the full socket may
// itself wait for a worker whose frames are still in the outbox.
//
// Frames, in little-endian order and unaligned:
//
// clang-format off
//   call     u16 template (>= 16), u32 id of each input, u32 id of each output, values of the template's lengths
//   FREE     u16 0, u16 count, u32 id of each
//   MESSAGE  u16 1, u32 length, payload
//   LINE     u16 2, u32 call site of the following calls
//   ECHO     u16 3, u32 number: see inbox.h
// clang-format on
//
// allranks/remote/protocol/wire.py defines the meaning of the frames.
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

// The queues of all workers of one master. Create it with sys::make_owned. All methods are thread-safe.
//
// Methods throw std::invalid_argument if a worker or target does not exist. They throw std::runtime_error if the outbox
// is closed, or in a forked child.
class Outbox {
 public:
  static constexpr uint16_t kFirstTemplate = 16;        // lower numbers are the kinds of the other frames
  static constexpr size_t kMostBulk = size_t{1} << 30;  // limit of one worker's pending bytes of bulk messages

  // delay_ns: the time after which the thread sends a frame that no other frame or flush has sent.
  // chunk_bytes: the size of the memory that frames share. Longer messages have memory of their own.
  // limit_bytes: the pending bytes of one worker above which its callers wait.
  Outbox(int64_t delay_ns, size_t chunk_bytes, size_t limit_bytes);
  ~Outbox() { close(); }
  Outbox(const Outbox&) = delete;

  // The caller owns the sockets. It must keep a socket open until the worker is lost or replaced, or until the outbox
  // is closed.
  int add(int fd);
  void replace(int worker, int fd);  // start a new stream, and drop the pending bytes of the old one
  void lose(int worker);             // drop the pending bytes and all later frames

  int target(std::vector<int> workers);
  bool within(int part, int whole);  // return whether all workers of `part` are workers of `whole`

  // Queue a call and write a new id to each output. Blocks while a worker of the target has too many pending bytes.
  void call(int target, uint32_t line, uint16_t code, std::span<const uint32_t> inputs, std::span<uint32_t> outputs,
            std::span<const std::byte> values, Caller& caller);
  void reserve(int target, std::span<uint32_t> ids);
  // Free an id whose last use has been queued. The target's next frame is preceded by a FREE frame with the id. Calls
  // after that FREE may reuse the id.
  void free(int target, uint32_t id) noexcept;
  // Queue a message. If `bulk` is set, the message does not count for limit_bytes: it waits only for the limit of bulk
  // messages, kMostBulk. So a caller can queue a large tensor for a busy worker and continue to queue calls for it.
  void put(int target, std::span<const std::byte> head, std::span<const std::byte> payload, bool bulk, Caller& caller);

  // Request that each worker of the target sends the number back after it has processed all earlier frames. Flushes.
  void echo(int target, uint32_t number, Caller& caller);

  void flush(Caller& caller);  // write as many bytes as the sockets accept without blocking

  size_t pending(int worker);
  uint64_t sent(int worker);  // bytes sent to all processes that have been this worker
  int failure(int worker);    // errno, or 0
  size_t live();              // number of ids that are not free; like calls(), it also works if the outbox is closed
  uint64_t calls();

  // Stop the thread and drop all pending bytes. In a forked child this does nothing, because the parent continues to
  // use the sockets.
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
    int64_t line = -1;     // the last call site queued for it; -1: none
    int failure = 0;       // errno of its socket
    bool lost = false;     // the owner has called lose()
    bool full = false;     // its socket accepts no more bytes
    bool sending = false;  // a thread is writing from its queue, without the lock
    Memory memory;         // copies of short pieces while its socket is full (kShort)
    size_t end = 0;        // bytes used of this memory
    Piece copy(const Piece& piece);
    void append(Piece piece);
    bool gone() const { return lost || failure != 0; }
  };
  struct Target {
    std::vector<int> workers;     // sorted
    std::vector<uint32_t> frees;  // freed ids that are not in a FREE frame yet
  };
  enum class Sleep { none, timed, idle };  // state of the thread; idle: it sleeps until a caller writes to bell_
  class Hold;

  void check() const;
  Worker& worker(int number);
  Target& existing(int number);

  // Callers of the following functions hold lock_.
  void wait_for_room(int target, bool bulk, Hold& hold, Caller& caller);
  std::byte* extend(int target, size_t bytes);
  void seal();
  void enqueue(int target, const Piece& piece);
  void tell_line(int target, uint32_t line);
  void tell_frees(int target);
  void sweep();  // add the pending FREE frames, and queue the open piece
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
  std::condition_variable changed_;  // notifies waiters_: a worker has room, a send has finished, the outbox is closed
  int waiters_ = 0;
  std::deque<Worker> workers_;  // a deque, whose elements do not move: a sending thread refers to one without the lock
  std::vector<Target> targets_;
  std::vector<int> freeing_;  // targets with frees, without duplicates
  std::vector<uint32_t> spare_ids_;
  uint32_t ids_ = 0;  // number of ids created
  size_t live_ = 0;
  uint64_t calls_ = 0;

  // The current chunk, and the open piece [begin_, end_) at its end, which is in no worker's queue yet.
  Memory memory_;
  size_t memory_bytes_ = 0;
  size_t begin_ = 0;
  size_t end_ = 0;
  int open_ = -1;      // target of the open piece
  int64_t line_ = -1;  // call site that all workers of the open target know; -1: not known

  bool has_room_ = false;  // the open target had room at the last check, and no bytes have become pending since
  bool queued_ = false;    // there are frames or freed ids that only sweep() queues
  bool urgent_ = false;    // the thread must wake before the delay is over
  bool closed_ = false;
  Sleep sleep_ = Sleep::none;
  sys::Fd bell_;
  std::thread thread_;
};

}  // namespace allranks
