// Answers those who ask this process how it is, such as `ringrun status`.
//
// A connection is one request and its answer. It begins as one to a rendezvous (ringtrain/job/rendezvous/protocol.py):
//
//   asks                              answers
//   magic, a nonce               ->
//                                <-   a nonce, and its proof
//   its proof, a request         ->
//                                <-   the answer
//
// A proof is the HMAC of all that was said until then, under the secret. Request and answer are JSON behind a head of
// eight bytes: 0, and the length, the most significant byte first.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/descriptor.h"

namespace ringtrain {

class Answering {
 public:
  // The answer to a request. Called by several threads at a time; one that takes long delays nobody else.
  using Answer = std::function<std::string(const std::string& request)>;

  // Answers all who connect to `listener`, which must listen, and know the secret. Its thread sleeps until then.
  Answering(Descriptor listener, std::string secret, Answer answer);
  // Returns when no answer is under way any more, within two seconds; later ones own what they use.
  ~Answering();
  Answering(const Answering&) = delete;
  Answering& operator=(const Answering&) = delete;

 private:
  struct State;
  void listen();

  const Descriptor listener_;
  Descriptor wake_;  // an eventfd: readable at the end
  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace ringtrain
