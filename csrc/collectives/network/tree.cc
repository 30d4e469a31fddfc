#include <array>
#include <utility>
#include <vector>

#include "collectives/network/algorithms.h"
#include "kernels/copy.h"

namespace ringtrain {
namespace {

// For chunks that have parts of several arrays: as many as may be on their way in and out again.
constexpr size_t kSlots = 2 * Flow::kWindow;

// Data from the left is passed on to the right, chunk by chunk; the first of the chain only sends, the last only
// receives. A chunk within one array goes from where it is to where it belongs, any other one through a slot.
class Chain final : public Messages {
 public:
  Chain(const Endpoint& peers, const PieceLayout& layout, int root, size_t chunk_bytes, char* slots)
      : peers_(peers),
        layout_(layout),
        chunk_bytes_(chunk_bytes),
        slots_(slots),
        is_first_(peers.rank() == root),
        is_last_(peers.wrap(peers.rank() + 1) == root) {}
  size_t count() const override { return chunks_of(layout_.total(), chunk_bytes_); }
  Message outgoing(size_t i) override {
    if (is_first_) {
      find(i);
      copy_packed(i, [](char* slot, char* data, size_t bytes) { copy(slot, data, bytes); });
    }
    return is_last_ ? Message{} : to(peers_.rank() + 1, i);
  }
  Message incoming(size_t i) override {
    if (is_first_) return {};
    find(i);
    return to(peers_.rank() - 1, i);
  }
  void arrived(size_t i) override {
    if (is_first_) return;
    copy_packed(i, [](char* slot, char* data, size_t bytes) { copy(data, slot, bytes); });
  }
  bool may_send(size_t i, size_t arrived) const override { return is_first_ || i < arrived; }
  bool may_receive(size_t i, size_t sent) const override { return is_first_ || i < sent + kSlots; }

 private:
  struct Place {
    char* data;
    size_t bytes;
    bool is_packed;
  };

  // Where chunk i goes from, or comes to. Called once for each, in order.
  void find(size_t i) {
    const Chunk chunk = chunk_of(layout_.total(), chunk_bytes_, i);
    Place only = {};
    int arrays = 0;
    layout_.for_each(finding_, chunk.offset, chunk.count, [&](const char*, char* data, size_t, size_t bytes) {
      only = {data, bytes, false};
      ++arrays;
    });
    places_[i % kSlots] = arrays == 1 ? only : Place{slots_ + i % kSlots * chunk_bytes_, chunk.count, true};
  }

  // Calls copy(slot, data, bytes) for each array's part of chunk i, if it has a slot. In order.
  template <typename Copy>
  void copy_packed(size_t i, Copy copy) {
    const Place& place = places_[i % kSlots];
    if (!place.is_packed) return;
    layout_.for_each(
        copying_, i * chunk_bytes_, place.bytes,
        [&](const char*, char* data, size_t offset, size_t bytes) { copy(place.data + offset, data, bytes); });
  }

  Message to(int peer, size_t i) const {
    const Place& place = places_[i % kSlots];
    return {place.data, place.bytes, peers_.wrap(peer)};
  }

  const Endpoint& peers_;
  const PieceLayout& layout_;
  const size_t chunk_bytes_;
  char* const slots_;
  const bool is_first_, is_last_;
  PieceLayout::Cursor finding_, copying_;
  std::array<Place, kSlots> places_ = {};
};

}  // namespace

// The root is number 0. A rank receives from the rank whose number lacks its lowest bit, and sends to those whose
// numbers have one lower bit more.
void broadcast_by_tree(Endpoint& peers, const Message& data) {
  if (data.bytes == 0) return;
  const int size = peers.size(), number = peers.wrap(peers.rank() - data.peer);
  int distance = 1;
  while (distance < size && !(number & distance)) distance *= 2;
  if (number > 0) peers.wait(peers.receive(peers.wrap(peers.rank() - distance), data.data, data.bytes));
  std::vector<NetworkRequest> sends;
  for (distance /= 2; distance > 0; distance /= 2)
    if (number + distance < size)
      sends.push_back(peers.send(peers.wrap(peers.rank() + distance), data.data, data.bytes));
  for (NetworkRequest& send : sends) peers.wait(std::move(send));
}

void broadcast_by_chain(Endpoint& peers, const PieceLayout& layout, int root, size_t chunk_bytes, char* slots) {
  Chain messages(peers, layout, root, chunk_bytes, slots);
  run(peers, messages);
}

size_t chain_slots_bytes(size_t chunk_bytes) { return kSlots * chunk_bytes; }

void barrier_by_dissemination(Endpoint& peers, Scratch& token) {
  char* bytes = token.get(2);
  for (int distance = 1; distance < peers.size(); distance *= 2)
    exchange(peers, {&bytes[0], 1, peers.wrap(peers.rank() + distance)},
             {&bytes[1], 1, peers.wrap(peers.rank() - distance)}, 1);
}

}  // namespace ringtrain
