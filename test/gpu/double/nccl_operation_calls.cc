// The exported calls of NCCL: collectives, sends and receives, groups and operations of one's own.
#include <cstring>

#include "group.h"
#include "memory.h"
#include "nccl_library.h"

using namespace gpu_double;

namespace {

// The arguments that all calls have.
struct Arguments {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Stream> stream;
  Type type;

  Arguments(ncclComm_t comm, cudaStream_t on, ncclDataType_t number) : communicator(communicator_of(comm)) {
    if (const int error = communicator->error()) throw Refusal{error, "the communicator has failed before"};
    require(number >= 0 && number < kTypes, "invalid type " + std::to_string(number));
    type = static_cast<Type>(number);
    stream = with_driver([&] {
      std::shared_ptr<Stream> found = stream_of(communicator->context, on);
      if (&found->context != &communicator->context) throw Refusal{result::kInvalidHandle, "a stream of another GPU"};
      found->context.require_not_capturing(*found);
      return found;
    });
  }

  // How the double sees `count` values of which all must be in device memory of this GPU, or be pinned.
  char* view(const void* pointer, size_t count) const {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    Block block;
    require(memory().find(address, block), "a buffer is no GPU memory");
    require(block.kind != MemoryKind::device || block.device == communicator->context.device,
            "a buffer is on another GPU");
    char* const found = memory().view(address, count * size_of(type));
    require(found != nullptr, "a buffer is too short");
    return found;
  }

  void require_rank(int rank) const {
    require(rank >= 0 && rank < communicator->size, "invalid root or peer " + std::to_string(rank));
  }

  Collective collective(Kind kind, size_t count) const {
    return {kind, type, Reduction::sum, false, {}, 0, count, nullptr, nullptr};
  }

  void set_reduction(Collective& collective, ncclRedOp_t op) const {
    if (op >= 0 && op < nccl::kFirstOwnOp) {
      collective.reduction = static_cast<Reduction>(op);
      return;
    }
    Type type_of_op;
    require(communicator->find_op(op, type_of_op, collective.scalar), "invalid operation " + std::to_string(op));
    require(type_of_op == type, "the operation was made for another type");
    collective.is_scaled = true;
  }

  // All ranks leave out what is empty.
  void submit(const Collective& collective) const {
    if (collective.count > 0) gpu_double::submit({communicator, stream, false, collective, {}});
  }

  void submit(const Transfer& transfer) const { gpu_double::submit({communicator, stream, true, {}, transfer}); }
};

template <typename Body>
ncclResult_t run_in_group(const Call& call, Body body) {
  const ncclResult_t code = call.run(body);
  if (code != 0) fail_group(code);
  return code;
}

void transfer(const Arguments& arguments, bool is_send, const void* buffer, size_t count, int peer) {
  arguments.require_rank(peer);
  char* const view = count > 0 ? arguments.view(buffer, count) : nullptr;
  arguments.submit(Transfer{is_send, peer, count * size_of(arguments.type), view});
}

}  // namespace

extern "C" {

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return run_in_group(Call("ncclAllReduce", count, type, op, comm, stream, send, receive), [&] {
    const Arguments arguments(comm, stream, type);
    Collective collective = arguments.collective(Kind::allreduce, count);
    arguments.set_reduction(collective, op);
    if (count == 0) return;
    collective.send = arguments.view(send, count);
    collective.receive = arguments.view(receive, count);
    arguments.submit(collective);
  });
}

ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return run_in_group(Call("ncclReduce", count, type, op, root, comm, stream, send, receive), [&] {
    const Arguments arguments(comm, stream, type);
    arguments.require_rank(root);
    Collective collective = arguments.collective(Kind::reduce, count);
    arguments.set_reduction(collective, op);
    collective.root = root;
    if (count == 0) return;
    collective.send = arguments.view(send, count);
    if (arguments.communicator->rank == root) collective.receive = arguments.view(receive, count);
    arguments.submit(collective);
  });
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return run_in_group(Call("ncclReduceScatter", count, type, op, comm, stream, send, receive), [&] {
    const Arguments arguments(comm, stream, type);
    Collective collective = arguments.collective(Kind::reduce_scatter, count);
    arguments.set_reduction(collective, op);
    if (count == 0) return;
    collective.send = arguments.view(send, count * static_cast<size_t>(arguments.communicator->size));
    collective.receive = arguments.view(receive, count);
    arguments.submit(collective);
  });
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return run_in_group(Call("ncclAllGather", count, type, comm, stream, send, receive), [&] {
    const Arguments arguments(comm, stream, type);
    Collective collective = arguments.collective(Kind::allgather, count);
    if (count == 0) return;
    collective.send = arguments.view(send, count);
    collective.receive = arguments.view(receive, count * static_cast<size_t>(arguments.communicator->size));
    arguments.submit(collective);
  });
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return run_in_group(Call("ncclBroadcast", count, type, root, comm, stream, send, receive), [&] {
    const Arguments arguments(comm, stream, type);
    arguments.require_rank(root);
    Collective collective = arguments.collective(Kind::broadcast, count);
    collective.root = root;
    if (count == 0) return;
    if (arguments.communicator->rank == root) collective.send = arguments.view(send, count);
    collective.receive = arguments.view(receive, count);
    arguments.submit(collective);
  });
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return run_in_group(Call("ncclSend", count, type, peer, comm, stream, send),
                      [&] { transfer(Arguments(comm, stream, type), true, send, count, peer); });
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return run_in_group(Call("ncclRecv", count, type, peer, comm, stream, receive),
                      [&] { transfer(Arguments(comm, stream, type), false, receive, count, peer); });
}

ncclResult_t ncclGroupStart() {
  return Call("ncclGroupStart").run([] { begin_group(); });
}

ncclResult_t ncclGroupEnd() {
  const ncclResult_t code = Call("ncclGroupEnd").run([] { end_group(); });
  if (code != 0) drop_group();
  return code;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, int residence,
                                      ncclComm_t comm) {
  return Call("ncclRedOpCreatePreMulSum", type, comm).run([&] {
    constexpr int kHostImmediate = 1;
    require(op != nullptr && scalar != nullptr, "op or scalar is null");
    require(type >= 0 && type < kTypes, "invalid type " + std::to_string(type));
    if (residence != kHostImmediate) throw Refusal{nccl::kInvalidUsage, "the double reads scalars from the host only"};
    Scalar copy{};
    std::memcpy(copy.data(), scalar, size_of(static_cast<Type>(type)));
    *op = communicator_of(comm)->add_op(static_cast<Type>(type), copy);
  });
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  return Call("ncclRedOpDestroy", op, comm).run([&] { communicator_of(comm)->remove_op(op); });
}
}
