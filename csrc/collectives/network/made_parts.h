// The messages of an allgather of what is made while it is sent: each part goes straight to every other rank.
#pragma once

#include "collectives/group.h"
#include "collectives/network/flow.h"

namespace ringtrain {

class MadeParts final : public Messages {
 public:
  // As Group::allgather_parts, all of which outlives this.
  MadeParts(const Endpoint& peers, const Group::Parts& parts, char* all, size_t bytes, size_t part_bytes)
      : peers_(peers),
        parts_(parts),
        all_(all),
        bytes_(bytes),
        part_bytes_(part_bytes),
        others_(static_cast<size_t>(peers.size() - 1)) {}

  size_t count() const override { return chunks_of(bytes_, part_bytes_) * others_; }
  Message outgoing(size_t i) override;
  Message incoming(size_t i) override;
  void arrived(size_t i) override;

 private:
  // All other ranks get a part before any gets the next one.
  size_t part_of(size_t i) const { return i / others_; }
  int distance_of(size_t i) const { return static_cast<int>(i % others_) + 1; }
  Message message(size_t i, int owner, int peer) const;
  // A part of others may be there before this rank has sent its own.
  void make_up_to(size_t part);

  const Endpoint& peers_;
  const Group::Parts& parts_;
  char* const all_;
  const size_t bytes_, part_bytes_, others_;
  size_t made_ = 0;  // parts
};

}  // namespace ringtrain
