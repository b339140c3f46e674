#include "channel/fabric.h"

#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/error.h"
#include "base/sys.h"

namespace allranks {

namespace {

constexpr uint32_t kVersion = FI_VERSION(1, 17);
// Bytes of a message: the limit up to which ofi_rxm (the layer of verbs and tcp) sends a message immediately. For
// longer ones, the receiver first requests the bytes, so the sender would have to wait for its calls.
constexpr size_t kMessage = 16 << 10;
// Messages that a sender may have sent before it needs credits. 512 KiB cover 20 us of a network of 200 Gbit/s.
constexpr uint32_t kWindow = 32;
// Credits return when half of the window has been read. At most two messages that only return credits are therefore
// unread, and a third one covers the moment in which the receive of one is posted again.
constexpr uint32_t kReceives = kWindow + 3;
constexpr size_t kInject = 1 << 10;  // above it, the copy of an injected message costs more than its completion
constexpr uint64_t kTags = (uint64_t{1} << 48) - 1;  // the providers with the fewest bits in a tag have 48
constexpr auto kTend = std::chrono::milliseconds(100);
constexpr int kTries = 4;      // to prepare a sleep, before the thread sleeps for 1 ms only
constexpr uint32_t kLook = 8;  // calls without a message for each read of the socket

// Precedes the bytes of each message. A message without bytes returns credits.
struct Header {
  uint32_t reposted;  // receives of messages with bytes that the sender has posted again, since the beginning
};

// The functions of libfabric that are symbols. All others are in the tables of the objects that they return.
struct Library {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_version) version;
  decltype(&::fi_strerror) strerror;
};

// Versions of the symbols: the layout of struct fi_info in the headers that this file is compiled with. Newer
// libraries keep the old versions.
template <class Function>
void find(void* handle, const char* name, const char* version, Function& function) {
  function = reinterpret_cast<Function>(dlvsym(handle, name, version));
  if (function == nullptr) throw Error(std::string("no symbol ") + name + "@" + version);
}

Library load(const std::vector<std::string>& paths) {
  std::string troubles;
  for (const std::string& path : paths) {
    // Never closed: providers register functions that run when the process exits.
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      troubles += std::string(troubles.empty() ? "" : "; ") + dlerror();
      continue;
    }
    try {
      Library library{};
      find(handle, "fi_getinfo", "FABRIC_1.3", library.getinfo);
      find(handle, "fi_freeinfo", "FABRIC_1.3", library.freeinfo);
      find(handle, "fi_dupinfo", "FABRIC_1.3", library.dupinfo);
      find(handle, "fi_fabric", "FABRIC_1.1", library.fabric);
      find(handle, "fi_version", "FABRIC_1.0", library.version);
      find(handle, "fi_strerror", "FABRIC_1.0", library.strerror);
      if (const uint32_t version = library.version(); FI_VERSION_LT(version, kVersion)) {
        throw Error("it has version " + std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version)) +
                    ", and 1.17 is needed");
      }
      return library;
    } catch (const Error& error) {
      troubles += (troubles.empty() ? "" : "; ") + path + ": " + error.text;
    }
  }
  throw Error("libfabric cannot be loaded: " + (troubles.empty() ? "no library is installed" : troubles));
}

const Library& library(const std::vector<std::string>& paths) {
  static const Library loaded = load(paths);  // after an exception, the next call tries again
  return loaded;
}

std::string reason(const Library& lib, ssize_t error) { return lib.strerror(static_cast<int>(std::abs(error))); }

using Info = std::unique_ptr<fi_info, decltype(&::fi_freeinfo)>;

// Return the devices that have what a Fabric needs: a list, null if there are none.
Info query(const Library& lib, const FabricChoice& choice, const char* source) {
  const Info hints(lib.dupinfo(nullptr), lib.freeinfo);
  if (hints == nullptr) throw Error("libfabric: no memory");
  hints->caps = FI_TAGGED;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->tx_attr->msg_order = FI_ORDER_SAS;
  hints->rx_attr->msg_order = FI_ORDER_SAS;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_ENDPOINT | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
  if (!choice.provider.empty()) hints->fabric_attr->prov_name = strdup(choice.provider.c_str());  // freed with hints
  fi_info* found = nullptr;
  const int failed = lib.getinfo(kVersion, source, nullptr, source == nullptr ? 0 : FI_SOURCE, hints.get(), &found);
  if (failed != 0 && failed != -FI_ENODATA) throw Error("libfabric: fi_getinfo: " + reason(lib, failed));
  return {failed == 0 ? found : nullptr, lib.freeinfo};
}

// Choose a device: one that has an address which other hosts reach, otherwise one that is not selected by IP addresses.
Info choose(const Library& lib, const FabricChoice& choice) {
  for (const std::string& source : choice.sources) {
    const Info found = query(lib, choice, source.c_str());
    if (found != nullptr) return {lib.dupinfo(found.get()), lib.freeinfo};
  }
  const Info found = query(lib, choice, nullptr);
  std::vector<const fi_info*> devices;
  for (const fi_info* info = found.get(); info != nullptr; info = info->next) {
    const auto same = [&](const fi_info* d) { return std::strcmp(d->domain_attr->name, info->domain_attr->name) == 0; };
    // All devices of the first fabric: the other hosts can reach each of them.
    if (std::strcmp(info->fabric_attr->name, found->fabric_attr->name) != 0) continue;
    if (std::none_of(devices.begin(), devices.end(), same)) devices.push_back(info);
  }
  if (devices.empty()) throw Error("libfabric: provider " + choice.provider + " has no device");
  return {lib.dupinfo(devices[static_cast<size_t>(choice.place) % devices.size()]), lib.freeinfo};
}

// Scope that keeps the signal handlers of the process. Libraries of providers replace them when they are loaded.
class SameSignalHandlers {
 public:
  SameSignalHandlers() {
    for (int i = 1; i < NSIG; i++) sigaction(i, nullptr, &before_[static_cast<size_t>(i)]);
  }
  ~SameSignalHandlers() {
    for (int i = 1; i < NSIG; i++) sigaction(i, &before_[static_cast<size_t>(i)], nullptr);
  }

 private:
  std::array<struct sigaction, NSIG> before_{};
};

template <class Fid>
void close(Fid*& fid) {
  if (fid != nullptr) fi_close(&fid->fid);
  fid = nullptr;
}

}  // namespace

std::vector<FabricDevice> fabric_devices(const FabricChoice& choice) {
  const SameSignalHandlers same;
  const Library& lib = library(choice.libraries);
  std::vector<FabricDevice> devices;
  const Info found = query(lib, choice, nullptr);
  for (const fi_info* info = found.get(); info != nullptr; info = info->next) {
    devices.push_back({info->fabric_attr->prov_name, info->domain_attr->name, info->fabric_attr->name});
  }
  return devices;
}

std::string fabric_version(const FabricChoice& choice) {
  const uint32_t version = library(choice.libraries).version();
  return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

// --- the endpoint ---

struct FabricLink::Buffer {
  fi_context2 context;  // first: the provider uses it, and the completion has its address
  FabricLink* link;
  std::byte* data;
  bool receives;
  bool complete;
  size_t nbytes;
  size_t read;
};

struct Fabric::Handles {
  explicit Handles(const Library& lib) : lib(lib), info(nullptr, lib.freeinfo) {}
  ~Handles() {
    // In this order: each object is used by those before it.
    close(endpoint);
    close(addresses);
    close(completions);
    close(domain);
    close(fabric);
  }
  void check(ssize_t result, const char* what) const {
    if (result < 0) throw Error(std::string("libfabric: ") + what + ": " + reason(lib, result));
  }

  const Library& lib;
  Info info;
  fid_fabric* fabric = nullptr;
  fid_domain* domain = nullptr;
  fid_cq* completions = nullptr;
  fid_av* addresses = nullptr;
  fid_ep* endpoint = nullptr;
};

Fabric::Fabric(const FabricChoice& choice)
    : handles_(std::make_unique<Handles>(library(choice.libraries))), provider_(choice.provider) {
  Handles& h = *handles_;
  h.info = choose(h.lib, choice);
  if (h.info->ep_attr->max_msg_size < kMessage) throw Error("libfabric: messages are limited to less than 16 KiB");
  h.check(h.lib.fabric(h.info->fabric_attr, &h.fabric, nullptr), "fi_fabric");
  h.check(fi_domain(h.fabric, h.info.get(), &h.domain, nullptr), "fi_domain");
  fi_cq_attr cq{
      .size = h.info->tx_attr->size + h.info->rx_attr->size, .format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_FD};
  const bool waits = fi_cq_open(h.domain, &cq, &h.completions, nullptr) == 0 &&
                     fi_control(&h.completions->fid, FI_GETWAIT, &wait_fd_) == 0;
  if (!waits) {
    close(h.completions);
    wait_fd_ = -1;
    blind_ = true;
    cq.wait_obj = FI_WAIT_NONE;
    h.check(fi_cq_open(h.domain, &cq, &h.completions, nullptr), "fi_cq_open");
  }
  fi_av_attr av{.type = h.info->domain_attr->av_type};
  h.check(fi_av_open(h.domain, &av, &h.addresses, nullptr), "fi_av_open");
  h.check(fi_endpoint(h.domain, h.info.get(), &h.endpoint, nullptr), "fi_endpoint");
  h.check(fi_ep_bind(h.endpoint, &h.completions->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
  h.check(fi_ep_bind(h.endpoint, &h.addresses->fid, 0), "fi_ep_bind");
  h.check(fi_enable(h.endpoint), "fi_enable");
  size_t nbytes = 0;
  fi_getname(&h.endpoint->fid, nullptr, &nbytes);  // fails, and sets the size
  address_.resize(nbytes);
  h.check(fi_getname(&h.endpoint->fid, address_.data(), &nbytes), "fi_getname");
  address_.resize(nbytes);
  tender_ = std::thread([this] { tend(); });
}

Fabric::~Fabric() {
  {
    const std::lock_guard lock(stopping_lock_);
    stopping_ = true;
  }
  stopped_.notify_all();
  if (tender_.joinable()) tender_.join();
  // Before the links: until the endpoint is closed, the provider may use their buffers.
  if (handles_->endpoint != nullptr && fi_close(&handles_->endpoint->fid) != 0) {
    // It may still use them. This memory is then never released.
    for (auto& link : links_) static_cast<void>(link.release());
  }
  handles_->endpoint = nullptr;
  links_.clear();
}

FabricLink& Fabric::connect(int socket) {
  const std::lock_guard lock(lock_);
  links_.reserve(links_.size() + 1);  // first: no exception may release a link after it has posted receives
  links_.push_back(std::unique_ptr<FabricLink>(new FabricLink(*this, socket)));
  return *links_.back();
}

int Fabric::sleep_ms(int most_ms) {
  const std::lock_guard lock(lock_);
  const uint64_t before = completions();
  for (int i = 0; i < kTries; i++) {
    progress();
    if (completions() != before) return 0;
    std::array<fid*, 1> fids{&handles_->completions->fid};
    // A refusal means that the provider may have something to do, or a completion, since.
    const bool ready = wait_fd_ >= 0 && fi_trywait(handles_->fabric, fids.data(), 1) == FI_SUCCESS;
    blind_.store(!ready, std::memory_order_relaxed);
    if (ready) return most_ms;
  }
  return std::min(most_ms, 1);
}

void Fabric::progress() {
  turns_.fetch_add(1, std::memory_order_relaxed);
  std::array<fi_cq_msg_entry, 16> entries;
  for (;;) {
    const ssize_t n = fi_cq_read(handles_->completions, entries.data(), entries.size());
    if (n > 0) completions_.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
    for (ssize_t i = 0; i < n; i++) {
      auto& buffer = *static_cast<FabricLink::Buffer*>(entries[static_cast<size_t>(i)].op_context);
      buffer.link->completed(buffer, entries[static_cast<size_t>(i)].len);
    }
    if (n == static_cast<ssize_t>(entries.size())) continue;
    if (n >= 0 || n == -FI_EAGAIN || n == -FI_EINTR) return;
    if (n != -FI_EAVAIL) {
      for (const auto& link : links_) link->failed(nullptr, "fi_cq_read: " + reason(handles_->lib, n));
      return;
    }
    fi_cq_err_entry error{};
    if (fi_cq_readerr(handles_->completions, &error, 0) < 0) return;
    if (error.op_context == nullptr) continue;
    auto& buffer = *static_cast<FabricLink::Buffer*>(error.op_context);
    std::array<char, 128> detail{};
    const char* why =
        fi_cq_strerror(handles_->completions, error.prov_errno, error.err_data, detail.data(), detail.size());
    std::string text = reason(handles_->lib, error.err);
    if (why != nullptr && text != why) text += std::string(" (") + why + ")";
    buffer.link->failed(&buffer, std::move(text));
  }
}

// Progress while no thread of the rank does: most providers move bytes only in calls. A rank that computes must still
// receive what fits into its buffers, as the kernel does over TCP, so that a rank that has sent can leave.
// Longer than the slices in which waiting threads sleep (net.cc, shm.cc), so that it does not take their completions.
void Fabric::tend() {
  sys::leave_signals();
  uint64_t seen = 0;
  std::unique_lock waiting(stopping_lock_);
  while (!stopped_.wait_for(waiting, kTend, [this] { return stopping_; })) {
    const std::unique_lock lock(lock_, std::try_to_lock);
    if (lock.owns_lock() && turns_.load(std::memory_order_relaxed) == seen) {
      for (const auto& link : links_) link->turn();
    }
    seen = turns_.load(std::memory_order_relaxed);
  }
}

// --- a link ---

// The buffers of a link: kReceives for each direction.
struct FabricLink::Slab {
  Slab(FabricLink& link, const Fabric::Handles& h) : buffers(2 * kReceives) {
    void* memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Error("mmap of the buffers of a connection: " + std::string(std::strerror(errno)));
    data = static_cast<std::byte*>(memory);
    // A device writes to the pages of this process. A forked child must not share them.
    madvise(memory, bytes(), MADV_DONTFORK);
    try {
      if ((h.info->domain_attr->mr_mode & FI_MR_LOCAL) != 0) {
        h.check(fi_mr_reg(h.domain, data, bytes(), FI_SEND | FI_RECV, 0, 0, 0, &registered, nullptr),
                "memory cannot be registered (raise the limit of locked memory: ulimit -l unlimited)");
        if ((h.info->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
          h.check(fi_mr_bind(registered, &h.endpoint->fid, 0), "fi_mr_bind");
          h.check(fi_mr_enable(registered), "fi_mr_enable");
        }
        descriptor = fi_mr_desc(registered);
      }
    } catch (...) {
      release();
      throw;
    }
    for (size_t i = 0; i < buffers.size(); i++) {
      buffers[i] = {.link = &link, .data = data + i * kMessage, .receives = i >= kReceives};
    }
  }
  ~Slab() { release(); }
  void release() {
    close(registered);
    munmap(data, bytes());
  }
  size_t bytes() const { return buffers.size() * kMessage; }

  std::vector<Buffer> buffers;
  std::byte* data = nullptr;
  fid_mr* registered = nullptr;
  void* descriptor = nullptr;
};

FabricLink::FabricLink(Fabric& fabric, int socket) : fabric_(fabric), socket_(socket) {
  if (getrandom(&own_tag_, sizeof own_tag_, 0) != sizeof own_tag_) throw Error("getrandom failed");
  own_tag_ &= kTags;
  slab_ = std::make_unique<Slab>(*this, *fabric_.handles_);
  for (Buffer& buffer : slab_->buffers) (buffer.receives ? unposted_ : free_).push_back(&buffer);
  post_receives();
  const auto size = static_cast<uint16_t>(fabric_.address_.size());
  std::string hello(reinterpret_cast<const char*>(&size), sizeof size);
  hello.append(reinterpret_cast<const char*>(&own_tag_), sizeof own_tag_);
  write(hello + fabric_.address_);
}

FabricLink::~FabricLink() = default;

std::string FabricLink::error() {
  const std::lock_guard lock(fabric_.lock_);
  return error_;
}

void FabricLink::failed(Buffer* buffer, std::string text) {
  if (buffer != nullptr && !buffer->receives) in_flight_--;
  if (error_.empty()) error_ = std::move(text);
  ended_.store(true, std::memory_order_relaxed);
}

// Post the receives that are not posted. The provider may have no room for them now: a later call tries again.
void FabricLink::post_receives() {
  Fabric::Handles& h = *fabric_.handles_;
  while (!unposted_.empty()) {
    Buffer& buffer = *unposted_.back();
    const bool had_bytes = buffer.nbytes > sizeof(Header);
    const ssize_t failure =
        fi_trecv(h.endpoint, buffer.data, kMessage, slab_->descriptor, FI_ADDR_UNSPEC, own_tag_, 0, &buffer.context);
    if (failure == -FI_EAGAIN) return;
    if (failure != 0) return failed(nullptr, "fi_trecv: " + reason(h.lib, failure));
    unposted_.pop_back();
    if (had_bytes) reposted_++;
    buffer.complete = false;
    buffer.nbytes = buffer.read = 0;
    posted_.push_back(&buffer);
  }
}

// Send a message that free_.back() contains, after its header. Return false if the provider has no room for it now.
bool FabricLink::post_send(Buffer& buffer, size_t nbytes) {
  const Fabric::Handles& h = *fabric_.handles_;
  const Header header{reposted_};
  std::memcpy(buffer.data, &header, sizeof header);
  const size_t size = sizeof header + nbytes;
  const bool inject = size <= std::min(kInject, h.info->tx_attr->inject_size);
  const ssize_t failure =
      inject ? fi_tinject(h.endpoint, buffer.data, size, peer_, peer_tag_)
             : fi_tsend(h.endpoint, buffer.data, size, slab_->descriptor, peer_, peer_tag_, &buffer.context);
  if (failure != 0) {
    if (failure != -FI_EAGAIN) failed(nullptr, "fi_tsend: " + reason(h.lib, failure));
    return false;
  }
  messages_++;
  returned_ = header.reposted;
  if (!inject) {
    in_flight_++;
    free_.pop_back();
  }
  return true;
}

void FabricLink::return_credits() {
  if (ready_ && reposted_ - returned_ >= kWindow / 2 && !free_.empty() && !ended()) post_send(*free_.back(), 0);
}

void FabricLink::completed(Buffer& buffer, size_t nbytes) {
  buffer.complete = true;
  if (!buffer.receives) {
    in_flight_--;
    free_.push_back(&buffer);
    return;
  }
  buffer.nbytes = nbytes;
  // Messages of different sizes may be completed in another order than that of their bytes.
  while (!posted_.empty() && posted_.front()->complete) {
    arrived_.push_back(posted_.front());
    posted_.pop_front();
    arrive();
  }
}

// Process the header of the last message.
void FabricLink::arrive() {
  Buffer& buffer = *arrived_.back();
  received_++;
  Header header;
  if (buffer.nbytes < sizeof header) return failed(nullptr, "a message is too short");
  std::memcpy(&header, buffer.data, sizeof header);
  credited_ = header.reposted;
  buffer.read = sizeof header;
  if (buffer.nbytes == sizeof header) {
    arrived_.pop_back();
    unposted_.push_back(&buffer);
    post_receives();
  }
  reply();
}

size_t FabricLink::put(const iovec* parts, size_t n) {
  const std::lock_guard lock(fabric_.lock_);
  if (ended()) return 0;
  if (!ready_ || sent_ - credited_ >= kWindow || free_.empty()) turn();
  size_t taken = 0;
  size_t part = 0;
  size_t offset = 0;
  while (ready_ && !ended() && part < n && sent_ - credited_ < kWindow && !free_.empty()) {
    Buffer& buffer = *free_.back();
    size_t filled = 0;
    while (part < n && filled < kMessage - sizeof(Header)) {
      const size_t some = std::min(parts[part].iov_len - offset, kMessage - sizeof(Header) - filled);
      std::memcpy(buffer.data + sizeof(Header) + filled, static_cast<const std::byte*>(parts[part].iov_base) + offset,
                  some);
      filled += some;
      offset += some;
      if (offset == parts[part].iov_len) {
        part++;
        offset = 0;
      }
    }
    if (filled == 0) break;
    if (!post_send(buffer, filled)) {
      turn();
      break;
    }
    sent_++;
    taken += filled;
  }
  return taken;
}

size_t FabricLink::get(void* to, size_t nbytes) {
  const std::lock_guard lock(fabric_.lock_);
  if (arrived_.empty()) turn();
  size_t come = 0;
  while (come < nbytes && !arrived_.empty()) {
    Buffer& buffer = *arrived_.front();
    const size_t some = std::min(nbytes - come, buffer.nbytes - buffer.read);
    std::memcpy(static_cast<std::byte*>(to) + come, buffer.data + buffer.read, some);
    come += some;
    buffer.read += some;
    if (buffer.read < buffer.nbytes) break;
    arrived_.pop_front();
    unposted_.push_back(&buffer);
    post_receives();
    return_credits();
  }
  return come;
}

bool FabricLink::sent() {
  const std::lock_guard lock(fabric_.lock_);
  if (in_flight_ > 0) turn();
  return in_flight_ == 0 || ended();
}

bool FabricLink::finish() {
  const std::lock_guard lock(fabric_.lock_);
  turn();
  look();
  if (!end_written_ && ready_ && in_flight_ == 0) {
    write(std::string("E") + std::string(reinterpret_cast<const char*>(&messages_), sizeof messages_));
    end_written_ = true;
  }
  return confirmed_ || ended() || (!ready_ && messages_ == 0);
}

// Progress the endpoint, and what this link has to send.
void FabricLink::turn() {
  fabric_.progress();
  post_receives();
  return_credits();
  if (!ready_ || ++idle_ % kLook == 0) look();
}

// --- the socket of a link ---

// The records of a link fit into the empty buffer of its socket.
void FabricLink::write(const std::string& record) {
  if (::send(socket_, record.data(), record.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) return;  // look() finds the end
}

void FabricLink::look() {
  std::array<char, 512> some;
  while (!socket_over()) {
    const ssize_t n = recv(socket_, some.data(), some.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      socket_error_.store(n < 0 ? errno : 0, std::memory_order_relaxed);
      socket_over_.store(true, std::memory_order_relaxed);
      break;
    }
    inbox_.append(some.data(), static_cast<size_t>(n));
  }
  parse();
  reply();
  // The messages that the peer has announced may still arrive, unless its process was killed.
  if (socket_over() && (end_ == UINT64_MAX || received_ >= end_)) ended_.store(true, std::memory_order_relaxed);
}

void FabricLink::parse() {
  if (!ready_) {
    uint16_t size = 0;
    constexpr size_t kHello = sizeof size + sizeof peer_tag_;
    if (inbox_.size() < kHello) return;
    std::memcpy(&size, inbox_.data(), sizeof size);
    std::memcpy(&peer_tag_, inbox_.data() + sizeof size, sizeof peer_tag_);
    if (inbox_.size() < kHello + size) return;
    Fabric::Handles& h = *fabric_.handles_;
    if (fi_av_insert(h.addresses, inbox_.data() + kHello, 1, &peer_, 0, nullptr) != 1) {
      return failed(nullptr, "fi_av_insert: the address of the other rank was refused");
    }
    inbox_.erase(0, kHello + size);
    ready_ = true;
  }
  while (!inbox_.empty()) {
    if (inbox_[0] == 'E') {
      if (inbox_.size() < 1 + sizeof end_) return;
      std::memcpy(&end_, inbox_.data() + 1, sizeof end_);
      inbox_.erase(0, 1 + sizeof end_);
    } else if (inbox_[0] == 'A') {
      confirmed_ = true;
      inbox_.erase(0, 1);
    } else {
      return failed(nullptr, "the socket of the connection carries unexpected bytes");
    }
  }
}

// Answer the peer's end when all of its messages have arrived.
void FabricLink::reply() {
  if (replied_ || end_ == UINT64_MAX || received_ < end_) return;
  replied_ = true;
  write("A");
}

}  // namespace allranks
