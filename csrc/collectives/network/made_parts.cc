#include "collectives/network/made_parts.h"

namespace ringtrain {

Message MadeParts::message(size_t i, int owner, int peer) const {
  const Chunk part = chunk_of(bytes_, part_bytes_, part_of(i));
  return {all_ + static_cast<size_t>(owner) * bytes_ + part.offset, part.count, peer};
}

Message MadeParts::outgoing(size_t i) {
  make_up_to(part_of(i));
  return message(i, peers_.rank(), peers_.wrap(peers_.rank() + distance_of(i)));
}

Message MadeParts::incoming(size_t i) {
  const int peer = peers_.wrap(peers_.rank() - distance_of(i));
  return message(i, peer, peer);
}

void MadeParts::arrived(size_t i) {
  if ((i + 1) % others_ != 0) return;
  make_up_to(part_of(i));
  const Chunk part = chunk_of(bytes_, part_bytes_, part_of(i));
  parts_.use(part.offset, part.count);
}

void MadeParts::make_up_to(size_t part) {
  for (; made_ <= part; ++made_) {
    const Chunk next = chunk_of(bytes_, part_bytes_, made_);
    parts_.make(next.offset, next.count);
  }
}

}  // namespace ringtrain
