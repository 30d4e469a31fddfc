// An operation on its way to one server, chunk by chunk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "kvstore/worker/remote.h"

namespace ringtrain {

// On the thread of the Remote from when it is added on.
struct RemoteFlight {
  // One of the messages that it takes: a chunk, or the rows of one.
  struct Leg {
    uint32_t chunk;
    size_t begin, count;          // elements of the values that are given, and of the answer's place
    const ElementRanges* ranges;  // null: all of the chunk
  };

  explicit RemoteFlight(RemoteOperation of) : operation(std::move(of)) {}

  size_t legs() const {
    if (operation.rows) return operation.rows->size();
    return operation.layout->first_chunk(operation.piece + 1) - operation.layout->first_chunk(operation.piece);
  }
  Leg leg(size_t i) const {
    if (operation.rows) {
      const RowsOfChunk& rows = (*operation.rows)[i];
      return {rows.chunk, rows.begin, rows.count, &rows.ranges};
    }
    const size_t number = operation.layout->first_chunk(operation.piece) + i;
    const KeyChunk& chunk = operation.layout->chunks()[number];
    return {static_cast<uint32_t>(number), chunk.begin, chunk.count, nullptr};
  }

  // Of the values that are sent: bytes from their beginning up to an element, on which a word of codes begins.
  size_t bytes_up_to(size_t element) const {
    if (operation.quantizer.kind == Quantizer::Kind::none) return element * size_of(operation.dtype);
    return quantized_bytes(operation.quantizer.kind, element);
  }
  size_t value_bytes() const {
    size_t end = 0;
    for (size_t i = 0; i < legs(); ++i) end = std::max(end, leg(i).begin + leg(i).count);
    return operation.values ? bytes_up_to(end) : 0;
  }

  Head head(const Leg& leg) const {
    Head head;
    head.said = operation.said;
    head.dtype = operation.dtype;
    head.wanted = operation.wanted;
    head.store = operation.store;
    head.part = operation.part;
    head.chunk = leg.chunk;
    head.codes = static_cast<uint32_t>(operation.quantizer.kind);
    head.threshold = operation.quantizer.threshold;
    if (leg.ranges) head.ranges = static_cast<uint32_t>(leg.ranges->size());
    head.number = operation.number;
    head.lr = operation.lr;
    head.wd = operation.wd;
    return head;
  }

  bool is_all_sent() const { return sent == legs(); }
  bool is_over() const { return sent == answered && (is_all_sent() || error.has_value()); }
  void answer(int64_t num_update) {
    ++answered;
    smallest_num_update = std::min(smallest_num_update, num_update);
  }

  RemoteOperation operation;
  std::unique_ptr<char[]> copy;   // of the values
  size_t sent = 0, answered = 0;  // legs
  std::optional<Error> error;
  int64_t smallest_num_update = std::numeric_limits<int64_t>::max();
  int64_t place_in_line = 0;  // among those that wait to be sent: the smallest is the next
  uint64_t order = 0;         // of arrival
};
using RemoteFlightPtr = std::shared_ptr<RemoteFlight>;

// What is asked of a server, and who waits for the answer.
struct RemoteQuestion {
  Head head;
  Bytes body;
  RemoteReplyPtr reply;
  bool asks_again = false;  // what it is about, after another server has taken the place of the first one
};

}  // namespace ringtrain
