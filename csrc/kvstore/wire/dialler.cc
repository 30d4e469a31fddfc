#include "kvstore/wire/dialler.h"

#include <errno.h>

#include <utility>

namespace ringtrain {

Dialler::Dialler(Poller& poller, Owner& owner, const Credentials& credentials)
    : poller_(poller), owner_(owner), credentials_(credentials) {}

Dialler::~Dialler() { give_up(); }

void Dialler::dial(int to, const SocketAddress& address, double timeout_s) {
  const bool is_v6 = address.host.find(':') != std::string::npos;
  Descriptor socket = begin_connection(is_v6 ? "::" : "0.0.0.0", address, timeout_s);
  if (!socket) return owner_.cannot_dial(errno);
  handshake_.emplace(Handshake::dial(std::move(socket), to, 0, credentials_));
  poller_.add(handshake_->socket(), *this, true);
}

void Dialler::give_up() {
  if (!handshake_) return;
  poller_.remove(handshake_->socket());
  handshake_.reset();
}

void Dialler::is_ready(uint32_t) {
  if (!handshake_) return;
  const Handshake::State state = handshake_->advance();
  if (state == Handshake::State::under_way)
    return poller_.wait_for_writing(handshake_->socket(), *this, handshake_->has_to_write());
  poller_.remove(handshake_->socket());
  Handshake handshake = std::move(*handshake_);
  handshake_.reset();
  if (state == Handshake::State::done)
    owner_.dialled(handshake.take());
  else
    owner_.cannot_dial(handshake.error());
}

}  // namespace ringtrain
