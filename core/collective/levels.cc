#include "collective/levels.h"

#include <cstring>
#include <numeric>

namespace allranks {

namespace {

// Return whether counter a has reached b. Counters wrap, so the sign of the difference decides.
bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

}  // namespace

Levels::Levels(Shm& shm, const std::vector<std::vector<int>>& groups)
    : shm_(shm), groups_(groups), where_(static_cast<size_t>(shm.size())), all_(static_cast<size_t>(shm.size())) {
  std::iota(all_.begin(), all_.end(), 0);
  for (const auto& group : groups) {
    leaders_.push_back(group.front());
    for (size_t i = 0; i < group.size(); i++) {
      where_[static_cast<size_t>(group[i])] = {group.front(), i};
      if (group[i] == shm.rank()) group_ = group;
    }
  }
  leader_ = group_.front();
  operands_.resize(all_.size());
  if (leads()) shm.reserve_groups();
}

template <class Ranks, class IsThere>
int Levels::missing(const Ranks& ranks, size_t& next, IsThere&& is_there) const {
  for (; next < ranks.size(); next++) {
    if (!is_there(ranks[next])) return shm_.number(ranks[next]);
  }
  return -1;
}

Arrived Levels::meet(LocalCall& call, size_t nbytes, const Combining* combining) {
  // seq_cst, here and for all numbers and steps below: pairs with Shm::ring. Either the waiting rank sees the new
  // number, or the ringing rank sees the sleeper.
  const auto has_come = [&](int r) {
    return shm_.call_line(r, call.number).number.load(std::memory_order_seq_cst) == call.number;
  };
  size_t next = 0;
  if (leads()) {
    if (missing(group_, next, has_come) >= 0) {
      shm_.wait(shm_.gate(leader_), call.patience, call.about, [&] { return missing(group_, next, has_come); });
    }
    lead(call, nbytes, combining);
  } else {
    if (missing(group_, next, has_come) < 0) Shm::ring(shm_.gate(leader_));  // only the last rank wakes the leader
    const ReleaseLine& release = shm_.release_line(leader_, call.number);
    const auto released = [&] {
      return release.number.load(std::memory_order_seq_cst) == call.number ? -1 : shm_.number(leader_);
    };
    size_t first = 0;
    // Errors name a rank that has not arrived, not the leader that waits for it.
    shm_.wait(shm_.group_gate(leader_), call.patience, call.about, released, [&] {
      const int late = released() < 0 ? -1 : missing(all_, first, has_come);
      return late >= 0 ? late : released();
    });
  }
  const ReleaseLine& release = shm_.release_line(leader_, call.number);
  return {.agree = release.agree != 0,
          .met_ns = release.arrival.met_ns,
          .before_last_ns = release.arrival.met_ns - release.arrival.late_ns,
          .last = release.arrival.last};
}

// Summarize the call lines of a group that has arrived, and copy its operands to one place.
Arrived Levels::gather_group(const LocalCall& call, size_t nbytes) {
  const Fingerprint& own = shm_.call_line(leader_, call.number).fingerprint;
  std::byte* operands = shm_.group_operands(leader_, call.number);
  Arrived group;
  for (size_t i = 0; i < group_.size(); i++) {
    const CallLine& line = shm_.call_line(group_[i], call.number);
    group.add({.agree = line.fingerprint.agrees(own) && line.fingerprint.site == 0,
               .met_ns = line.entered_ns,
               .last = group_[i]});
    if (nbytes > 0) std::memcpy(operands + i * nbytes, line.payload.data(), nbytes);
  }
  return group;
}

void Levels::lead(LocalCall& call, size_t nbytes, const Combining* combining) {
  Arrived arrived = gather_group(call, nbytes);
  GroupLine& mine = shm_.group_line(leader_, call.number);
  mine.agree = arrived.agree ? 1 : 0;
  mine.fingerprint = shm_.call_line(leader_, call.number).fingerprint;
  mine.met_ns = arrived.met_ns;
  mine.before_last_ns = arrived.before_last_ns;
  mine.last = arrived.last;
  mine.number.store(call.number, std::memory_order_seq_cst);

  const auto has_gathered = [&](int leader) {
    return shm_.group_line(leader, call.number).number.load(std::memory_order_seq_cst) == call.number;
  };
  size_t next = 0;
  if (missing(leaders_, next, has_gathered) < 0) {
    Shm::ring(shm_.gate());  // only the last leader wakes the others
  } else {
    size_t first = 0;
    const auto late = [&] { return missing(leaders_, next, has_gathered); };
    shm_.wait(shm_.gate(), call.patience, call.about, late, [&] {
      const auto has_come = [&](int r) {
        return shm_.call_line(r, call.number).number.load(std::memory_order_seq_cst) == call.number;
      };
      const int rank = late() < 0 ? -1 : missing(all_, first, has_come);
      return rank >= 0 ? rank : late();
    });
  }
  for (const int leader : leaders_) {
    if (leader == leader_) continue;
    const GroupLine& line = shm_.group_line(leader, call.number);
    arrived.add({.agree = line.agree != 0 && line.fingerprint.agrees(mine.fingerprint),
                 .met_ns = line.met_ns,
                 .before_last_ns = line.before_last_ns,
                 .last = line.last});
  }
  ReleaseLine& release = shm_.release_line(leader_, call.number);
  release.agree = arrived.agree ? 1 : 0;
  release.arrival = {
      .met_ns = arrived.met_ns, .late_ns = arrived.met_ns - arrived.before_last_ns, .last = arrived.last};
  if (arrived.agree && combining != nullptr) {
    for (const int r : all_) operands_[static_cast<size_t>(r)] = operand(call, r, nbytes);
    combining->combine(release.payload.data(), operands_.data());
  }
  release.number.store(call.number, std::memory_order_seq_cst);
  Shm::ring(shm_.group_gate(leader_));
}

const std::byte* Levels::operand(const LocalCall& call, int rank, size_t nbytes) const {
  const Where& where = where_[static_cast<size_t>(rank)];
  const std::byte* operand = shm_.group_operands(where.leader, call.number) + where.index * nbytes;
  lines::touch(where.leader, operand);
  return operand;
}

const std::byte* Levels::combined(const LocalCall& call) const {
  return shm_.release_line(leader_, call.number).payload.data();
}

bool Levels::is_at_step(int rank, uint32_t done) const {
  return reached(shm_.step_line(rank).done.load(std::memory_order_seq_cst), done);
}

void Levels::post_step(uint32_t done) {
  shm_.step_line(shm_.rank()).done.store(done, std::memory_order_seq_cst);
  if (leads()) return;  // only the leader waits for its group, so a leader has no rank to wake
  size_t next = 0;
  if (missing(group_, next, [&](int r) { return is_at_step(r, done); }) < 0) Shm::ring(shm_.gate(leader_));
}

void Levels::wait_step(LocalCall& call, uint32_t done) {
  const auto is_there = [&](int r) { return is_at_step(r, done); };
  size_t next = 0;
  size_t first = 0;
  GroupSteps& mine = shm_.group_steps(leader_);
  if (!leads()) {
    const auto released = [&] {
      return reached(mine.of_all.load(std::memory_order_seq_cst), done) ? -1 : shm_.number(leader_);
    };
    shm_.wait(shm_.group_gate(leader_), call.patience, call.about, released, [&] {
      const int late = released() < 0 ? -1 : missing(all_, first, is_there);
      return late >= 0 ? late : released();
    });
    return;
  }
  shm_.wait(shm_.gate(leader_), call.patience, call.about, [&] { return missing(group_, next, is_there); });
  mine.of_group.store(done, std::memory_order_seq_cst);
  const auto group_is_there = [&](int leader) {
    return reached(shm_.group_steps(leader).of_group.load(std::memory_order_seq_cst), done);
  };
  next = 0;
  if (missing(leaders_, next, group_is_there) < 0) {
    Shm::ring(shm_.gate());
  } else {
    const auto late = [&] { return missing(leaders_, next, group_is_there); };
    shm_.wait(shm_.gate(), call.patience, call.about, late, [&] {
      const int rank = late() < 0 ? -1 : missing(all_, first, is_there);
      return rank >= 0 ? rank : late();
    });
  }
  mine.of_all.store(done, std::memory_order_seq_cst);
  Shm::ring(shm_.group_gate(leader_));
}

}  // namespace allranks
