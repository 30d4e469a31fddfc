#include "coordination/blobs.h"

#include <algorithm>
#include <cstdint>

namespace ringtrain {

Bytes joined(const std::vector<Bytes>& blobs) {
  Writer writer;
  writer.put(static_cast<uint64_t>(blobs.size()));
  Bytes before;
  for (const Bytes& blob : blobs) {
    const auto differs = std::mismatch(blob.begin(), blob.end(), before.begin(), before.end()).first;
    writer.put(static_cast<uint64_t>(differs - blob.begin()));
    writer.put(Bytes(differs, blob.end()));
    before = blob;
  }
  return writer.take();
}

std::vector<Bytes> separated(const Bytes& message, size_t count) {
  Reader reader(message);
  std::vector<Bytes> blobs;
  Bytes before;
  if (reader.get<uint64_t>() != count) throw failure("a message between ranks is not that of " + std::to_string(count));
  while (blobs.size() < count) {
    const auto alike = reader.get<uint64_t>();
    if (alike > before.size()) throw failure("a message between ranks does not fit the one before it");
    before.resize(alike);
    const auto rest = reader.get<Bytes>();
    before.insert(before.end(), rest.begin(), rest.end());
    blobs.push_back(before);
  }
  reader.require_end();
  return blobs;
}

}  // namespace ringtrain
