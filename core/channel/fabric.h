// Byte streams between hosts over libfabric: InfiniBand, RoCE, Slingshot, EFA (docs/decisions/145).
//
// libfabric is loaded at run time. A Fabric is one endpoint with reliable datagrams. A FabricLink is one byte stream
// on it, between two ranks. Each link has a window of registered buffers. The sender copies bytes into a buffer and
// sends it. The receiver has posted one receive for each buffer that the window permits, and returns credits.
//
// Each link belongs to a TCP socket between the same ranks, which net.h has authenticated. It carries three records:
// clang-format off
//   hello    first: the address of the sender's endpoint, and the tag that the receiver of the hello uses
//   end      when the sender leaves: the number of its messages
//   arrived  the answer to an end: all of them have arrived
// clang-format on
// The end of the socket is the end of the link: the kernel reports killed processes and lost hosts (net.h).
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace allranks {

struct FabricChoice {
  std::vector<std::string> libraries;  // candidates, in order of preference
  std::string provider;                // "": no fabric
  std::vector<std::string> sources;    // the IP addresses of this host that other hosts reach
  int place = 0;                       // spreads the ranks of a host over its devices
};

struct FabricDevice {
  std::string provider;
  std::string domain;
  std::string fabric;
};

// Return the devices of a provider ("": of all) that have what a Fabric needs. The first call loads the library, and
// initializes all of its providers, which takes some tenths of a second. Throws Error.
std::vector<FabricDevice> fabric_devices(const FabricChoice& choice);
// Return the version of the library that is loaded, such as "1.17". Throws Error.
std::string fabric_version(const FabricChoice& choice);

class FabricLink;

// Thread safety: all functions may be called from any thread.
class Fabric {
 public:
  explicit Fabric(const FabricChoice& choice);  // throws Error
  ~Fabric();                                    // ends all links; their owners do not use them any more
  Fabric(const Fabric&) = delete;

  // Create a link for a connected socket, which stays with the caller. Throws Error.
  FabricLink& connect(int socket);

  // Prepare the calling thread for a sleep in poll() with wait_fd(). Return how long it may sleep: 0 if messages have
  // arrived, otherwise most_ms, or 1 ms if the endpoint is blind.
  int sleep_ms(int most_ms);
  uint64_t completions() const { return completions_.load(std::memory_order_relaxed); }  // since the beginning
  int wait_fd() const { return wait_fd_; }  // -1: the provider has no descriptor to wait for
  // Return whether a message may arrive without waking a thread that sleeps. The thread must then check regularly.
  bool blind() const { return blind_.load(std::memory_order_relaxed); }

 private:
  friend class FabricLink;
  struct Handles;

  void progress();            // process all completions; with the lock held
  void progress_when_idle();  // the thread idle_progress_: progress all links if no other thread does

  std::unique_ptr<Handles> handles_;
  std::string provider_;
  std::string address_;
  int wait_fd_ = -1;
  std::mutex lock_;  // protects the endpoint and its links: providers need not be thread-safe
  std::vector<std::unique_ptr<FabricLink>> links_;
  std::atomic<uint64_t> progress_calls_ = 0;  // calls of progress()
  std::atomic<uint64_t> completions_ = 0;
  std::atomic<bool> blind_ = false;
  std::mutex stopping_lock_;
  std::condition_variable stopped_;
  bool stopping_ = false;
  std::thread idle_progress_;
};

class FabricLink {
 public:
  ~FabricLink();

  // As in Stream.
  size_t put(const iovec* parts, size_t n);
  size_t get(void* to, size_t nbytes);

  // Return whether all bytes have been handed to the network. Until then, this rank must continue to call.
  bool sent();
  // Announce the end of the stream. Called repeatedly. Return whether the other side has received everything, or has
  // ended.
  bool finish();

  bool ended() const { return ended_.load(std::memory_order_relaxed); }
  int socket_error() const { return socket_error_.load(std::memory_order_relaxed); }
  bool socket_over() const { return socket_over_.load(std::memory_order_relaxed); }
  std::string error();  // of the provider; "": none
  Fabric& fabric() { return fabric_; }

 private:
  friend class Fabric;
  struct Buffer;
  struct Slab;

  FabricLink(Fabric& fabric, int socket);

  // All with the lock of the fabric held.
  // Progress the endpoint, and send what this link has to send by itself.
  void progress();
  // Post the receives that are not posted. The provider may have no room for them now: a later call tries again.
  void post_receives();
  // Send a message that free_.back() contains, after its header. Return false if the provider has no room for it now.
  bool post_send(Buffer& buffer, size_t nbytes);
  // Send a message without bytes if the peer waits for many credits.
  void return_credits();
  // Process the completion of a send, or of a receive of nbytes.
  void completed(Buffer& buffer, size_t nbytes);
  // End the link. buffer: the send or receive that has failed, if any.
  void failed(Buffer* buffer, std::string text);
  // Process the header of the newest message in arrived_.
  void read_header();
  // Read the records of the socket, and detect its end.
  void read_socket();
  void parse_records();
  // Answer the peer's "end" when all of its messages have arrived.
  void confirm_end();
  void write_record(const std::string& record);

  Fabric& fabric_;
  int socket_;
  uint64_t own_tag_;
  uint64_t peer_tag_ = 0;
  uint64_t peer_ = 0;   // fi_addr_t
  bool ready_ = false;  // the hello of the peer has arrived
  std::unique_ptr<Slab> slab_;
  std::vector<Buffer*> free_;      // for sends
  std::vector<Buffer*> unposted_;  // for receives
  std::deque<Buffer*> posted_;     // receives, in the order of the posts, which is the order of the bytes
  std::deque<Buffer*> arrived_;    // with bytes that have not been read
  uint32_t sent_ = 0;              // messages with bytes
  uint32_t credited_ = 0;          // of these, the ones whose buffers the peer has posted again
  uint32_t reposted_ = 0;          // receives of messages with bytes that have been posted again
  uint32_t returned_ = 0;          // of these, the ones that the peer has been notified of
  uint64_t messages_ = 0;          // sent, including those that only return credits
  uint64_t received_ = 0;          // the same, received
  uint32_t in_flight_ = 0;         // sends without a completion
  uint32_t fruitless_ = 0;         // calls of progress(), see kSocketEvery
  std::string inbox_;              // bytes of the socket that are not a complete record yet
  uint64_t end_ = UINT64_MAX;      // the peer's number of messages, when it has announced it
  bool end_written_ = false;
  bool confirmed_ = false;  // by the peer
  bool replied_ = false;    // to the peer
  std::string error_;
  std::atomic<bool> ended_ = false;
  std::atomic<bool> socket_over_ = false;
  std::atomic<int> socket_error_ = 0;
};

}  // namespace allranks
