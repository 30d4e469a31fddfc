// A Channel in which everybody reports to rank 0, as Horovod's coordinator has it: what TreeChannel is measured
// against.
#pragma once

#include "coordination/channel.h"
#include "coordination/wire.h"

namespace ringtrain {

class StarChannel final : public Channel {
 public:
  explicit StarChannel(Wire& wire) : Channel(wire.rank(), wire.size()), wire_(wire) {}

  void begin_and(const Words&) override {}
  bool finish_and(Words& words, double deadline) override;
  std::vector<Bytes> gather(const Bytes& mine) override;
  Bytes broadcast(const Bytes& mine) override;
  bool is_called() override { return wire_.has_arrived(Tag::bits); }

 private:
  Wire& wire_;
};

}  // namespace ringtrain
