#include "network/byte_stream.h"

#include <errno.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

namespace ringtrain {
namespace {

// From so many bytes on a part gets records of its own: the receiver opens these where its message belongs, and copies
// the text of others there.
constexpr size_t kLongPart = 4 << 10;
constexpr size_t kMostParts = 64;  // of a record

ssize_t counted(uint64_t& bytes, ssize_t moved) {
  if (moved > 0) bytes += static_cast<uint64_t>(moved);
  return moved;
}

}  // namespace

// Parts of which some bytes have been taken.
class ByteStream::Rest {
 public:
  Rest(const iovec* parts, size_t count) : parts_(parts), end_(parts + count) {}

  void skip(size_t bytes) {
    for (; bytes > 0 && bytes >= parts_->iov_len; ++parts_) bytes -= parts_->iov_len;
    taken_ = bytes;
  }
  // Takes the text of the next record: the parts, how many, and the number of bytes; 0: there is none.
  size_t take(iovec* text, size_t& count) {
    size_t bytes = 0;
    for (count = 0; parts_ < end_ && count < kMostParts && bytes < Sealing::kMostText;) {
      const size_t left = parts_->iov_len - taken_;
      if (left >= kLongPart && bytes > 0) break;
      const size_t part = std::min(left, Sealing::kMostText - bytes);
      if (part > 0) text[count++] = {static_cast<char*>(parts_->iov_base) + taken_, part};
      bytes += part;
      taken_ += part;
      if (taken_ < parts_->iov_len) break;
      ++parts_;
      taken_ = 0;
      if (left >= kLongPart) break;
    }
    return bytes;
  }

 private:
  const iovec *parts_, *const end_;
  size_t taken_ = 0;  // of the first
};

ssize_t ByteStream::send(const iovec* parts, size_t count) {
  if (!sealing_) {
    msghdr message = {};
    message.msg_iov = const_cast<iovec*>(parts);
    message.msg_iovlen = count;
    return counted(sent_bytes_, ::sendmsg(socket(), &message, MSG_NOSIGNAL | MSG_DONTWAIT));
  }
  size_t sent = 0;
  Rest rest(parts, count);
  rest.skip(out_text_);
  while (true) {
    const bool is_flushed = flush();
    sent += take_sent_text();
    if (!is_flushed) return sent > 0 ? static_cast<ssize_t>(sent) : -1;
    seal_some(rest);
    if (out_text_ == 0) return static_cast<ssize_t>(sent);
  }
}

// Of each record that the kernel has as a whole: the other side may answer it before it has the next one.
size_t ByteStream::take_sent_text() {
  const size_t before = out_text_;
  while (out_record_ < out_end_) {
    const size_t text = Sealing::text_bytes(out_.data() + out_record_);
    const size_t end = out_record_ + Sealing::kHeadBytes + text + Sealing::kTagBytes;
    if (end > out_begin_) break;
    out_record_ = end;
    out_text_ -= text;
  }
  return before - out_text_;
}

// As many records as one call of the kernel should take.
void ByteStream::seal_some(Rest& rest) {
  out_.resize(3 * Sealing::kMostBytes);
  out_begin_ = out_end_ = out_record_ = 0;
  while (out_end_ + Sealing::kMostBytes <= out_.size()) {
    iovec text[kMostParts];
    size_t used = 0;
    const size_t bytes = rest.take(text, used);
    if (bytes == 0) return;
    out_end_ += sealing_->seal(text, used, bytes, out_.data() + out_end_);
    out_text_ += bytes;
  }
}

// Whether nothing is left; else errno says why.
bool ByteStream::flush() {
  while (out_begin_ < out_end_) {
    const ssize_t sent = counted(
        sent_bytes_, ::send(socket(), out_.data() + out_begin_, out_end_ - out_begin_, MSG_NOSIGNAL | MSG_DONTWAIT));
    if (sent < 0) return false;
    out_begin_ += static_cast<size_t>(sent);
  }
  return true;
}

ssize_t ByteStream::receive(const iovec* parts, size_t count) {
  if (!sealing_) return counted(received_bytes_, ::readv(socket(), parts, static_cast<int>(count)));
  size_t received = 0;
  for (size_t i = 0; i < count; ++i) {
    for (size_t came = 0; came < parts[i].iov_len;) {
      const ssize_t more = receive_some(static_cast<char*>(parts[i].iov_base) + came, parts[i].iov_len - came);
      if (more <= 0) return received > 0 ? static_cast<ssize_t>(received) : more;
      came += static_cast<size_t>(more);
      received += static_cast<size_t>(more);
    }
  }
  return static_cast<ssize_t>(received);
}

ssize_t ByteStream::receive_some(char* place, size_t room) {
  if (text_begin_ < text_end_) return take_text(place, room);
  if (error_ != 0) return fail(error_);
  while (true) {
    const size_t there = in_end_ - in_begin_;
    const char* record = in_.data() + in_begin_;
    const bool has_head = there >= Sealing::kHeadBytes;
    const size_t bytes = has_head ? Sealing::text_bytes(record) : 0;
    if (has_head && bytes == 0) return fail(EBADMSG);
    const size_t whole = Sealing::kHeadBytes + bytes + Sealing::kTagBytes;
    if (has_head && there >= whole) {
      in_begin_ += whole;
      const bool has_place = bytes <= room;
      if (!has_place) text_.resize(Sealing::kMostText);
      if (!sealing_->open(record, bytes, has_place ? place : text_.data())) return fail(EBADMSG);
      if (has_place) return static_cast<ssize_t>(bytes);
      text_begin_ = 0;
      text_end_ = bytes;
      return take_text(place, room);
    }
    in_.resize(2 * Sealing::kMostBytes);
    if (in_begin_ == in_end_ || in_.size() - in_begin_ < Sealing::kMostBytes) {
      std::memmove(in_.data(), in_.data() + in_begin_, there);
      in_begin_ = 0;
      in_end_ = there;
    }
    const ssize_t came =
        counted(received_bytes_, ::recv(socket(), in_.data() + in_end_, in_.size() - in_end_, MSG_DONTWAIT));
    if (came == 0) return 0;
    if (came < 0) return errno == EAGAIN || errno == EINTR ? -1 : fail(errno);
    in_end_ += static_cast<size_t>(came);
  }
}

ssize_t ByteStream::take_text(char* place, size_t room) {
  const size_t bytes = std::min(room, text_end_ - text_begin_);
  std::memcpy(place, text_.data() + text_begin_, bytes);
  text_begin_ += bytes;
  return static_cast<ssize_t>(bytes);
}

// Also where it is asked once more: the kernel tells an error once.
ssize_t ByteStream::fail(int error) {
  errno = error_ = error;
  return -1;
}

}  // namespace ringtrain
