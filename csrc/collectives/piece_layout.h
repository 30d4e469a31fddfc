// Many arrays as one: laid end to end on paper, each beginning on a cache line, without being copied together.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/copy.h"

namespace ringtrain {

class PieceLayout {
 public:
  PieceLayout(const std::vector<Piece>& pieces, size_t element_bytes) : pieces_(pieces), element_bytes_(element_bytes) {
    begins_.reserve(pieces.size());
    const size_t line = 64 / element_bytes;
    for (const Piece& piece : pieces) {
      begins_.push_back(total_);
      total_ += (piece.count + line - 1) / line * line;
    }
  }

  // Elements, padding included.
  size_t total() const { return total_; }

  // Remembers where the last range ended, so that walking forward costs nothing.
  struct Cursor {
    size_t piece = 0;
  };

  // Calls visit(source, destination, offset within the range, count) for every part of a piece in [begin, begin +
  // count). Ranges of one cursor must come in increasing order.
  template <typename Visit>
  void for_each(Cursor& cursor, size_t begin, size_t count, Visit visit) const {
    const size_t end = begin + count;
    while (cursor.piece < pieces_.size() && begins_[cursor.piece] + pieces_[cursor.piece].count <= begin)
      ++cursor.piece;
    for (size_t i = cursor.piece; i < pieces_.size() && begins_[i] < end; ++i) {
      const size_t first = std::max(begin, begins_[i]);
      const size_t last = std::min(end, begins_[i] + pieces_[i].count);
      if (first >= last) continue;
      const size_t offset = (first - begins_[i]) * element_bytes_;
      visit(static_cast<const char*>(pieces_[i].source) + offset, static_cast<char*>(pieces_[i].destination) + offset,
            first - begin, last - first);
    }
  }

 private:
  const std::vector<Piece>& pieces_;
  const size_t element_bytes_;
  std::vector<size_t> begins_;
  size_t total_ = 0;
};

}  // namespace ringtrain
