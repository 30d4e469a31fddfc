// A thread of a worker that talks to some of its servers over TCP. Each server has one such thread, and no other one
// touches its connection and what is on its way there.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/signals.h"
#include "kvstore/wire/mailbox.h"
#include "kvstore/worker/remote_server.h"
#include "network/poller.h"

namespace ringtrain {

// Any thread.
class RemoteThread {
 public:
  // All outlive this. `servers`: their numbers.
  RemoteThread(std::string name, Traffic& traffic, const RemoteOptions& options, const Credentials& credentials,
               const std::vector<int>& servers);
  ~RemoteThread();
  RemoteThread(const RemoteThread&) = delete;
  RemoteThread& operator=(const RemoteThread&) = delete;

  // Before start().
  const RemoteReplyPtr& hello_of(int server) const { return servers_.at(server)->hello(); }
  void start();

  // Has the thread do work(there), with one of its servers. Nothing happens with what comes after it has ended.
  template <typename Work>
  void tell(int server, Work work) {
    mailbox_.post([this, server, work = std::move(work)] { do_with(*servers_.at(server), work); });
  }
  // Has the thread do work().
  void post(Mailbox::Work work) { mailbox_.post(std::move(work)); }
  // On the thread: whether all of its servers have all, and a message to each.
  bool has_all() const;
  void say(const Head& head);

  // Operations that are pending at its servers fail, and the thread ends.
  void ask_to_end();
  void join();

 private:
  template <typename Work>
  static void do_with(RemoteServer& there, const Work& work) {
    if (const auto error = error_of([&] { work(there); })) there.begin_again(*error);
  }
  void run();
  void take_turn();

  const std::string name_;
  Poller poller_;
  Mailbox mailbox_{poller_};
  std::map<int, std::unique_ptr<RemoteServer>> servers_;  // by number; from start() on the thread's
  bool stops_ = false;                                    // the thread only
  Thread thread_;
};

}  // namespace ringtrain
