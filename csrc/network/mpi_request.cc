// Who owns what MPI works with.
#include <algorithm>

#include "base/call_thread.h"
#include "network/mpi.h"

namespace ringtrain {

// ----------------------------------------------------------------------------------------------------------- requests

MpiRequest& MpiRequest::operator=(MpiRequest&& other) noexcept {
  std::swap(mpi_, other.mpi_);
  std::swap(handle_, other.handle_);
  std::swap(can_be_cancelled_, other.can_be_cancelled_);
  std::swap(memory_, other.memory_);
  return *this;
}

MpiRequest::~MpiRequest() {
  if (mpi_) mpi_->abandon(std::move(*this));
}

Mpi::Lending::Lending(Mpi* mpi, std::shared_ptr<const void> memory) : mpi_(mpi), before_(std::move(memory)) {
  if (mpi_) std::swap(mpi_->lent_, before_);
}

Mpi::Lending::~Lending() {
  if (mpi_) std::swap(mpi_->lent_, before_);
}

MpiRequest Mpi::begun(uint64_t handle, Kind kind) {
  MpiRequest request;
  request.mpi_ = this;
  request.handle_ = handle;
  request.can_be_cancelled_ = kind == Kind::message;
  request.memory_ = lent_;
  return request;
}

bool Mpi::test(MpiRequest& request) {
  if (!abandoned_.empty()) forget_ended();
  if (request.has_ended()) return true;
  bool has_ended = false;
  const int code = look(request.handle_, has_ended);
  if (code != 0) keep_for_ever(request.memory_);
  if (code != 0 || has_ended) request.end();
  check(code, "MPI_Test");
  return has_ended;
}

// What can be cancelled usually ends at once. The others end when their ranks go on, or never.
void Mpi::abandon(MpiRequest request) noexcept {
  if (request.can_be_cancelled_) cancel(request.handle_);
  abandoned_.push_back(std::move(request));
  forget_ended();
}

// What they own goes after them, since it may let go of more.
void Mpi::forget_ended() noexcept {
  std::vector<std::shared_ptr<const void>> memory;
  for (MpiRequest& request : abandoned_) {
    bool has_ended = false;
    const int code = look(request.handle_, has_ended);
    if (code != 0) keep_for_ever(request.memory_);
    if (code == 0 && !has_ended) continue;
    memory.push_back(request.memory_);
    request.end();
  }
  abandoned_.erase(std::remove_if(abandoned_.begin(), abandoned_.end(),
                                  [](const MpiRequest& request) { return request.has_ended(); }),
                   abandoned_.end());
}

Mpi::~Mpi() { keep_for_ever(std::move(abandoned_)); }

// ------------------------------------------------------------------------------------------------------ communicators

MpiCommunicator::~MpiCommunicator() {
  if (mpi_) mpi_->unused_.push_back(handle_);
}

void Mpi::free_unused(Watch& watch) {
  if (unused_.empty()) return;
  CallThread thread;
  for (const MpiComm unused : std::exchange(unused_, {}))
    check(thread.run(call_to_free(unused), watch), "MPI_Comm_free");
}

}  // namespace ringtrain
