// The bytes of one connection, sealed or plain. Sends and receives as a socket that does not block.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/bytes.h"
#include "base/descriptor.h"
#include "network/sealing.h"

namespace ringtrain {

class ByteStream {
 public:
  // `sealing`: null for plain bytes.
  explicit ByteStream(Descriptor socket, std::unique_ptr<Sealing> sealing = nullptr)
      : socket_(std::move(socket)), sealing_(std::move(sealing)) {}

  int socket() const { return socket_.number(); }

  // As sendmsg(): the number of bytes, or -1 and errno. The next call begins with the first byte that did not count,
  // since a part of its record may have been sent.
  ssize_t send(const iovec* parts, size_t count);
  // As readv(); errno is EBADMSG where bytes were changed on their way. Then the parts may hold bytes that nobody has
  // sent.
  ssize_t receive(const iovec* parts, size_t count);
  // Whether receive() has nothing more to give, though it may have given bytes last: nothing else tells.
  bool has_failed() const { return error_ != 0; }
  // By the socket, so far: they grow while the other side takes or sends a long message.
  uint64_t sent_bytes() const { return sent_bytes_; }
  uint64_t received_bytes() const { return received_bytes_; }

 private:
  class Rest;
  void seal_some(Rest& rest);
  bool flush();
  size_t take_sent_text();
  ssize_t receive_some(char* place, size_t room);
  ssize_t take_text(char* place, size_t room);
  ssize_t fail(int error);

  Descriptor socket_;
  std::unique_ptr<Sealing> sealing_;
  Bytes out_, in_, text_;  // records that go out, those that come, and the text of one that has no place yet
  size_t out_begin_ = 0, out_end_ = 0;
  size_t out_record_ = 0, out_text_ = 0;  // the first record of which send() has not told, and the bytes of their texts
  size_t in_begin_ = 0, in_end_ = 0, text_begin_ = 0, text_end_ = 0;
  uint64_t sent_bytes_ = 0, received_bytes_ = 0;
  int error_ = 0;  // why nothing more comes
};

}  // namespace ringtrain
