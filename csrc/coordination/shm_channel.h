// A Channel between the ranks of one node: everybody writes on its board and reads the others'.
#pragma once

#include "coordination/channel.h"
#include "fabric/node.h"
#include "fabric/wait.h"

namespace ringtrain {

class ShmChannel final : public Channel {
 public:
  // `node` and `watch` outlive this.
  ShmChannel(Node& node, Watch& watch) : Channel(node.index(), node.size()), node_(node), watch_(watch) {}

  void and_bits(Words& words) override;
  std::vector<Bytes> gather(const Bytes& mine) override;
  Bytes broadcast(const Bytes& mine) override;

  void call() override;
  bool is_called() override { return node_.is_wanted(round_ + 1); }

 private:
  // After write(own board), and once all have done the same, read(member, board) for everybody. The boards stay as they
  // are until this rank's next exchange.
  template <typename Write, typename Read>
  void exchange(Write write, Read read);

  Node& node_;
  Watch& watch_;
  Waiter waiter_;
  uint32_t exchanges_ = 0;
  uint32_t round_ = 0;  // calls of and_bits so far
};

}  // namespace ringtrain
