// Messages of several ranks in one: of each the part in which it differs from one before.
//
// In the first step of a training all ranks announce the same gradients, or those of one stage of a pipeline do: a
// message that begins as one of the last ones of kMostKinds kinds takes a few bytes. So N messages of K bytes of few
// kinds take K + N bytes, and a few times K of memory; only where all differ do they take N times K.
#pragma once

#include <cstddef>
#include <vector>

#include "base/bytes.h"

namespace ringtrain {

class Gathered {
 public:
  Gathered() = default;
  explicit Gathered(const Bytes& message) { add(message); }

  void add(const Bytes& message);
  // Adds so many messages. Throws failure unless `bytes` are the bytes() of so many.
  void append(const Bytes& bytes, size_t messages);

  const Bytes& bytes() const { return bytes_; }
  size_t count() const { return count_; }

  // Calls visit(message, kind, alike) for each, in order. The first `alike` bytes are those of the message of this kind
  // that came before; kinds have the numbers from 0 on, in the order of their first messages.
  template <typename Visit>
  void for_each(Visit visit) const {
    read(bytes_, count_, visit);
  }

 private:
  static constexpr size_t kMostKinds = 16;

  struct Place {
    size_t kind, alike;
  };
  Place place_of(const Bytes& message) const;
  // Makes the next message of the last one of its kind.
  static Place read_next(Reader& reader, std::vector<Bytes>& last);
  template <typename Visit>
  static void read(const Bytes& bytes, size_t messages, Visit visit) {
    std::vector<Bytes> last;
    Reader reader(bytes);
    for (; messages > 0; --messages) {
      const auto [kind, alike] = read_next(reader, last);
      visit(static_cast<const Bytes&>(last[kind]), kind, alike);
    }
    reader.require_end();
  }

  Bytes bytes_;
  std::vector<Bytes> last_;  // message of each kind
  size_t last_kind_ = 0;     // that was added to
  size_t count_ = 0;
};

}  // namespace ringtrain
