// How two ranks of a job begin a connection: each proves that it knows the secret of the job before the other takes any
// more bytes from it.
//
//   dials                             answers
//   Hello: who, which of its     ->
//   connections, and a nonce
//                                <-   Challenge: a nonce, and the answering side's proof
//   Proof of the dialling side   ->
//                                <-   Welcome
//
// Until it is welcomed, the dialling rank has a connection that the other one may still end, because its time is over
// or descriptors run out, and may dial again: nothing was sent over it. From then on an end without a bye is a death.
//
// A proof is the HMAC of all that was said until then, under the secret: it is good for this connection alone, and
// cannot be sent back to its maker. The side that dials says whether the connection is sealed; a rank whose own ones
// are takes no other.
#pragma once

#include <string>

#include "base/bytes.h"
#include "base/descriptor.h"
#include "base/sha256.h"
#include "network/byte_stream.h"

namespace ringtrain {

// The facts that connections of one generation of one job share.
struct Credentials {
  std::string secret, token;
  int rank, size;          // this rank, and how many there are
  bool is_sealed = false;  // connections that this rank dials, and takes
};

// Over a socket that does not block. Fails, without saying anything, where the other one is not what it should be.
class Handshake {
 public:
  // `credentials` outlive this.
  static Handshake dial(Descriptor socket, int to, int stream, const Credentials& credentials);
  static Handshake answer(Descriptor socket, const Credentials& credentials);

  // The events that the socket must become ready for.
  bool has_to_write() const { return sent_ < out_.size(); }
  // Goes on as far as it can. Only what belongs to the handshake is read.
  enum class State { under_way, done, failed };
  State advance();

  // The dialling rank, and the other one. On the answering side: known when it is done.
  bool dials() const { return dials_; }
  int peer() const { return peer_; }
  // Which of the connections that the dialling rank makes to the other one. A later one takes the place of an earlier.
  int stream() const { return stream_; }
  // Of the side that dials: whether it has said all, so that the other one may take the connection for made.
  bool has_proved_itself() const { return wait_ == Wait::welcome && !has_to_write(); }
  // Of the side that answers.
  bool has_heard_hello() const { return wait_ != Wait::hello; }
  // Whether the other host has answered: something could be written.
  bool is_connected() const { return !dials_ || sent_ > 0 || wait_ != Wait::challenge; }
  void give_up(int error) { error_ = error; }
  int socket() const { return socket_.number(); }
  // Why it has failed, as errno; 0: not because of the connection.
  int error() const { return error_; }
  // The connection, sealed if the side that dials has said so. Throws failure as Sealing.
  ByteStream take();

 private:
  enum class Wait { hello, challenge, proof, welcome, nothing };

  Handshake(Descriptor socket, const Credentials& credentials, bool dials)
      : socket_(std::move(socket)),
        credentials_(&credentials),
        dials_(dials),
        is_sealed_(dials && credentials.is_sealed) {}

  void expect(Wait wait);
  bool take_message();
  bool take_hello();
  bool take_challenge();
  bool take_proof();
  bool take_welcome();
  void say(const Bytes& message);
  Sha256 proof(const char* of_whom) const;
  State stopped(ssize_t moved);

  Descriptor socket_;
  const Credentials* credentials_;
  bool dials_, is_sealed_;
  int peer_ = -1, stream_ = 0, error_ = 0;
  Wait wait_ = Wait::nothing;
  Bytes out_, in_;
  size_t sent_ = 0, came_ = 0;
  std::string said_;  // by both, until now
};

}  // namespace ringtrain
