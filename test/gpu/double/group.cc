#include "group.h"

#include <algorithm>

#include "call.h"
#include "settings.h"

namespace gpu_double {
namespace {

struct Group {
  int depth = 0;
  int error = 0;
  std::vector<Operation> operations;
};

thread_local Group group;

template <typename T>
void add_new(std::vector<std::shared_ptr<T>>& all, const std::shared_ptr<T>& one) {
  if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
}

// One launch for each communicator, in the order in which they were first used.
void launch(const std::vector<Operation>& operations, const std::shared_ptr<Communicator>& communicator) {
  std::vector<std::shared_ptr<Stream>> streams;
  std::vector<Collective> collectives;
  std::vector<Transfer> transfers;
  for (const Operation& operation : operations) {
    if (operation.communicator != communicator) continue;
    add_new(streams, operation.stream);
    if (operation.is_transfer)
      transfers.push_back(operation.transfer);
    else
      collectives.push_back(operation.collective);
  }
  if (!collectives.empty() && settings().has_handshakes) communicator->shake_hands();
  communicator->launch(streams, [collectives, transfers](Communicator& us) {
    for (const Collective& collective : collectives) carry_out(us, collective);
    carry_out(us, transfers);
  });
}

void launch_all(const std::vector<Operation>& operations) {
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (const Operation& operation : operations) add_new(communicators, operation.communicator);
  for (const auto& communicator : communicators) launch(operations, communicator);
}

}  // namespace

void begin_group() { ++group.depth; }

void end_group() {
  if (group.depth == 0) throw Refusal{nccl::kInvalidUsage, "ncclGroupEnd without ncclGroupStart"};
  if (--group.depth > 0) return;
  const Group ended = std::move(group);
  group = Group();
  if (ended.error != 0) throw Refusal{ended.error, "a call of the group was refused"};
  launch_all(ended.operations);
}

void submit(const Operation& operation) {
  if (group.depth == 0)
    launch_all({operation});
  else
    group.operations.push_back(operation);
}

void fail_group(int code) {
  if (group.depth > 0 && group.error == 0) group.error = code;
}

void drop_group() { group = Group(); }

}  // namespace gpu_double
