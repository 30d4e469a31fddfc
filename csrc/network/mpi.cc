#include "network/mpi.h"

#include <numeric>
#include <utility>

#include "base/call_thread.h"
#include "base/dtype.h"
#include "base/dynlib.h"
#include "base/error.h"
#include "network/network.h"

namespace ringtrain {
namespace {

template <typename Handle>
struct Table {
  using H = Handle;
  // clang-format off
  int (*Isend)(const void*, int, H, int, int, H, H*);
  int (*Irecv)(void*, int, H, int, int, H, H*);
  int (*Iprobe)(int, int, H, int*, void*);
  int (*Test)(H*, int*, void*);
  int (*Cancel)(H*);
  int (*Iallreduce)(const void*, void*, int, H, H, H, H*);
  int (*Comm_group)(H, H*);
  int (*Group_incl)(H, int, const int*, H*);
  int (*Group_free)(H*);
  int (*Comm_create_group)(H, H, int, H*);
  int (*Comm_free)(H*);
  int (*Comm_set_errhandler)(H, H);
  int (*Error_class)(int, int*);
  int (*Error_string)(int, char*, int*);
  int (*Group_size)(H, int*);
  int (*Group_translate_ranks)(H, int, const int*, H, int*);
  int (*Comm_get_failed)(H, H*);  // null without ULFM
  int (*Query_cuda_support)();    // null where nobody has thought of it
  // clang-format on

  explicit Table(const DynamicLibrary& library) {
    library.find(Isend, "MPI_Isend");
    library.find(Irecv, "MPI_Irecv");
    library.find(Iprobe, "MPI_Iprobe");
    library.find(Test, "MPI_Test");
    library.find(Cancel, "MPI_Cancel");
    library.find(Iallreduce, "MPI_Iallreduce");
    library.find(Comm_group, "MPI_Comm_group");
    library.find(Group_incl, "MPI_Group_incl");
    library.find(Group_free, "MPI_Group_free");
    library.find(Comm_create_group, "MPI_Comm_create_group");
    library.find(Comm_free, "MPI_Comm_free");
    library.find(Comm_set_errhandler, "MPI_Comm_set_errhandler");
    library.find(Error_class, "MPI_Error_class");
    library.find(Error_string, "MPI_Error_string");
    library.find(Group_size, "MPI_Group_size");
    library.find(Group_translate_ranks, "MPI_Group_translate_ranks");
    library.find_optional(Comm_get_failed, "MPIX_Comm_get_failed");
    library.find_optional(Query_cuda_support, "MPIX_Query_cuda_support");
  }
};

template <typename Handle>
class MpiNetwork final : public Network, public LibraryCollectives {
 public:
  MpiNetwork(const MpiDescription& description, const std::vector<RankName>& names)
      : names_(names),
        call_(DynamicLibrary(description.library)),
        world_(static_cast<Handle>(description.communicator)),
        byte_(handle(description, "byte")),
        in_place_(reinterpret_cast<void*>(static_cast<intptr_t>(constant(description, "in_place")))),
        any_source_(static_cast<int>(constant(description, "any_source"))),
        err_proc_failed_(static_cast<int>(constant(description, "err_proc_failed"))),
        err_revoked_(static_cast<int>(constant(description, "err_revoked"))),
        errors_return_(handle(description, "errors_return")) {
    for (int i = 0; i < kDTypes; ++i) {
      const auto dtype = static_cast<DType>(i);
      if (!is_half(dtype)) dtypes_[i] = handle(description, name_of(dtype));
    }
    for (const Reduce reduce : {Reduce::sum, Reduce::min, Reduce::max, Reduce::product})
      reduces_[static_cast<int>(reduce)] = handle(description, name_of(reduce));
    check(call_.Comm_set_errhandler(world_, errors_return_), "MPI_Comm_set_errhandler");
  }

  ~MpiNetwork() override { forget_ended(); }

  NetworkRequest isend(const void* data, size_t bytes, int to, int tag) override {
    return started("MPI_Isend", Kind::message, [&](Handle* request) {
      return call_.Isend(data, static_cast<int>(bytes), byte_, to, tag, world_, request);
    });
  }

  NetworkRequest irecv(void* data, size_t bytes, int from, int tag) override {
    return started("MPI_Irecv", Kind::message, [&](Handle* request) {
      return call_.Irecv(data, static_cast<int>(bytes), byte_, from, tag, world_, request);
    });
  }

  bool has_arrived(int from, int tag) override {
    int arrived = 0;
    check(call_.Iprobe(from, tag, world_, &arrived, status_), "MPI_Iprobe");
    return arrived != 0;
  }

  bool has_arrived_from_any(int tag) override { return has_arrived(any_source_, tag); }

  LibraryCollectives* collectives() override { return this; }

  bool denies_cuda() const override { return call_.Query_cuda_support && call_.Query_cuda_support() == 0; }

  // MPI has only blocking calls that make communicators and free them, which run on a thread of their own.
  std::unique_ptr<LibraryCommunicator> connect(const std::vector<int>& ranks, int tag, Watch& watch) override {
    Handle all{}, some{};
    check(call_.Comm_group(world_, &all), "MPI_Comm_group");
    check(call_.Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some), "MPI_Group_incl");
    const auto call = [create_group = call_.Comm_create_group, world = world_, some, tag] {
      Handle made{};
      const int code = create_group(world, some, tag, &made);
      return std::make_pair(code, made);
    };
    const auto [code, made] = CallThread().run(call, watch);
    check(code, "MPI_Comm_create_group");
    call_.Group_free(&some);
    call_.Group_free(&all);
    check(call_.Comm_set_errhandler(made, errors_return_), "MPI_Comm_set_errhandler");
    return std::make_unique<Communicator>(*this, made);
  }

  void free_unused(Watch& watch) override {
    if (unused_.empty()) return;
    CallThread thread;
    for (const Handle unused : std::exchange(unused_, {})) {
      const auto call = [free = call_.Comm_free, unused] {
        Handle handle = unused;
        return free(&handle);
      };
      check(thread.run(call, watch), "MPI_Comm_free");
    }
  }

 private:
  class Communicator final : public LibraryCommunicator {
   public:
    Communicator(MpiNetwork& mpi, Handle handle) : mpi_(mpi), handle_(handle) {}
    ~Communicator() override { mpi_.unused_.push_back(handle_); }

    NetworkRequest iallreduce(void* data, int count, DType dtype, Reduce reduce) override {
      return mpi_.started("MPI_Iallreduce", Kind::collective, [&](Handle* request) {
        return mpi_.call_.Iallreduce(mpi_.in_place_, data, count, mpi_.dtypes_[static_cast<int>(dtype)],
                                     mpi_.operation(dtype, reduce), handle_, request);
      });
    }

   private:
    MpiNetwork& mpi_;
    const Handle handle_;
  };

  int look(uint64_t& number, bool& has_ended) noexcept override {
    Handle handle = of(number);
    int flag = 0;
    const int code = call_.Test(&handle, &flag, status_);
    number = to_uint(handle);
    has_ended = flag != 0;
    return code;
  }

  void cancel(uint64_t number) noexcept override {
    Handle handle = of(number);
    call_.Cancel(&handle);
  }

  static Handle of(uint64_t handle) { return static_cast<Handle>(handle); }
  static uint64_t to_uint(Handle handle) { return static_cast<uint64_t>(handle); }

  static Handle handle(const MpiDescription& description, const std::string& name) {
    return of(description.handles.at(name));
  }
  static int64_t constant(const MpiDescription& description, const std::string& name) {
    return description.constants.at(name);
  }

  // For bool, whose bytes are 0 or 1 and travel as uint8, "or" is max and "and" is min.
  Handle operation(DType dtype, Reduce reduce) const {
    if (dtype == DType::boolean && reduce == Reduce::sum) reduce = Reduce::max;
    if (dtype == DType::boolean && reduce == Reduce::product) reduce = Reduce::min;
    return reduces_[static_cast<int>(reduce)];
  }

  template <typename Start>
  NetworkRequest started(const char* name, Kind kind, Start start) {
    Handle handle{};
    const int code = start(&handle);
    if (code != 0 && kind == Kind::collective) keep_lent();  // some of its messages may be under way
    check(code, name);
    return begun(to_uint(handle), kind);
  }

  // Ranks of the world that the library knows to have failed; always empty where it cannot tell (no ULFM).
  std::vector<int> failed_ranks() const {
    Handle failed{}, all{};
    if (!call_.Comm_get_failed || call_.Comm_get_failed(world_, &failed) != 0) return {};
    int count = 0;
    call_.Group_size(failed, &count);
    std::vector<int> places(static_cast<size_t>(count)), ranks(static_cast<size_t>(count));
    std::iota(places.begin(), places.end(), 0);
    call_.Comm_group(world_, &all);
    call_.Group_translate_ranks(failed, count, places.data(), all, ranks.data());
    call_.Group_free(&all);
    if (count > 0) call_.Group_free(&failed);  // the empty group may be a constant
    return ranks;
  }

  // MPI tells that somebody is gone, but not who; where it knows, the message is that of the node's own locks.
  Error peer_lost(const std::string& details) const {
    std::string text;
    for (const int rank : failed_ranks()) text += is_gone(names_[static_cast<size_t>(rank)]) + " ";
    return {ErrorKind::peer_lost, text.empty() ? details : text + "(" + details + ")"};
  }

  void require_success(int code) const override { check(code, "MPI_Test"); }

  void check(int code, const char* name) const {
    if (code == 0) return;  // MPI_SUCCESS is 0 by the standard
    int error_class = 0, length = 0;
    char text[1024] = "";  // no MPI's MPI_MAX_ERROR_STRING is larger
    call_.Error_class(code, &error_class);
    call_.Error_string(code, text, &length);
    const std::string details = std::string(name) + ": " + text;
    if (error_class == err_proc_failed_ || error_class == err_revoked_) throw peer_lost(details);
    throw failure(details);
  }

  const std::vector<RankName> names_;
  const Table<Handle> call_;
  const Handle world_, byte_;
  void* const in_place_;
  const int any_source_, err_proc_failed_, err_revoked_;
  const Handle errors_return_;
  Handle dtypes_[kDTypes] = {};
  Handle reduces_[4] = {};
  alignas(16) char status_[256];  // written by MPI, never read
  std::vector<Handle> unused_;    // communicators
};

}  // namespace

std::unique_ptr<Network> open_mpi(const MpiDescription& description, const std::vector<RankName>& names) {
  if (description.handle_bytes == 4) return std::make_unique<MpiNetwork<int32_t>>(description, names);
  if (description.handle_bytes == 8) return std::make_unique<MpiNetwork<uint64_t>>(description, names);
  throw failure("an MPI library with handles of " + std::to_string(description.handle_bytes) + " bytes is unknown");
}

}  // namespace ringtrain
