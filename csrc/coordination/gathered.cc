#include "coordination/gathered.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringtrain {
namespace {

// How many bytes are the same at the beginning.
size_t bytes_alike(const Bytes& a, const Bytes& b) {
  constexpr size_t kBlock = 256;
  const size_t most = std::min(a.size(), b.size());
  size_t same = 0;
  while (same + kBlock <= most && std::memcmp(a.data() + same, b.data() + same, kBlock) == 0) same += kBlock;
  while (same < most && a[same] == b[same]) ++same;
  return same;
}

}  // namespace

// Of the kind that it is most like; of a new one if it is not like half of any.
Gathered::Place Gathered::place_of(const Bytes& message) const {
  Place best = {last_.size(), 0};
  for (size_t i = 0; i < last_.size() && best.alike < message.size() / 8 * 7; ++i) {
    const size_t kind = (last_kind_ + i) % last_.size();
    const size_t alike = bytes_alike(message, last_[kind]);
    if (best.kind == last_.size() || alike > best.alike) best = {kind, alike};
  }
  if (best.alike < message.size() / 2 && last_.size() < kMostKinds) return {last_.size(), 0};
  return best;
}

void Gathered::add(const Bytes& message) {
  const auto [kind, alike] = place_of(message);
  Writer writer(std::move(bytes_));
  for (const size_t number : {kind, alike, message.size() - alike}) writer.put(static_cast<uint32_t>(number));
  writer.put_bytes(message.data() + alike, message.size() - alike);
  bytes_ = writer.take();
  if (kind == last_.size()) last_.emplace_back();
  last_[kind] = message;
  last_kind_ = kind;
  ++count_;
}

void Gathered::append(const Bytes& bytes, size_t messages) {
  read(bytes, messages, [&](const Bytes& message, size_t, size_t) { add(message); });
}

Gathered::Place Gathered::read_next(Reader& reader, std::vector<Bytes>& last) {
  const auto kind = reader.get<uint32_t>(), alike = reader.get<uint32_t>(), rest = reader.get<uint32_t>();
  if (kind > last.size() || kind >= kMostKinds) throw failure("a message between ranks is of a kind that is not there");
  const char* begin = reader.take(rest);
  if (kind == last.size()) last.emplace_back();
  Bytes& message = last[kind];
  if (alike > message.size()) throw failure("a message between ranks does not fit the one before it");
  message.resize(alike);
  message.insert(message.end(), begin, begin + rest);
  return {kind, alike};
}

}  // namespace ringtrain
