#include "fabric/nccl_memory.h"

#include <algorithm>

namespace ringtrain {
namespace {

constexpr int kSuccess = 0;
constexpr size_t kUnit = 512, kSlab = 32 << 20, kPage = 2 << 20;

size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

NcclMemory::~NcclMemory() {
  const Gpu::Current current(*gpu_);
  for (const Slab& slab : slabs_) library_.MemFree(slab.data);
}

std::shared_ptr<char> NcclMemory::allocate(size_t bytes) {
  if (!library_.MemAlloc || !library_.CommRegister) return nullptr;
  const Gpu::Current current(*gpu_);
  const size_t rounded = rounded_up(std::max<size_t>(bytes, 1), kUnit);
  char* data = nullptr;
  {
    const std::lock_guard lock(mutex_);
    data = take(rounded);
    if (!data && make_slab(rounded)) data = take(rounded);
  }
  if (!data) return nullptr;
  return {data, [memory = shared_from_this()](char* own) { memory->give_back(own); }};
}

char* NcclMemory::take(size_t bytes) {
  for (Slab& slab : slabs_)
    if (char* data = take_from(slab, bytes)) return data;
  return nullptr;
}

// Free neighbours become one on the way.
char* NcclMemory::take_from(Slab& slab, size_t bytes) {
  for (auto at = slab.pieces.begin(); at != slab.pieces.end(); ++at) {
    if (!is_free(at->second)) continue;
    for (auto next = std::next(at); next != slab.pieces.end() && is_free(next->second);) {
      at->second.bytes += next->second.bytes;
      next = slab.pieces.erase(next);
    }
    if (at->second.bytes < bytes) continue;
    const size_t rest = at->second.bytes - bytes;
    if (rest > 0) slab.pieces[at->first + bytes] = {rest, false, true, {}};
    at->second = {bytes, true, false, {}};
    return slab.data + at->first;
  }
  return nullptr;
}

bool NcclMemory::make_slab(size_t bytes) {
  const size_t whole = std::max(kSlab, rounded_up(bytes, kPage));
  void* data = nullptr;
  if (library_.MemAlloc(&data, whole) != kSuccess) return false;
  slabs_.push_back({static_cast<char*>(data), whole, {{0, {whole, false, true, {}}}}});
  made_.store(slabs_.size(), std::memory_order_release);
  return true;
}

void NcclMemory::give_back(const char* data) {
  const std::lock_guard lock(mutex_);
  for (Slab& slab : slabs_) {
    if (data < slab.data || data >= slab.data + slab.bytes) continue;
    Piece& piece = slab.pieces.at(static_cast<size_t>(data - slab.data));
    piece.is_taken = false;
    order(piece);
  }
}

// Where that cannot be said now, while a stream is captured into a graph, it is tried again later.
void NcclMemory::order(Piece& piece) const {
  try {
    piece.after = {gpu_->record_of_user(nullptr), gpu_->record(gpu_->stream()), gpu_->record(gpu_->upload_stream())};
    piece.is_ordered = true;
  } catch (const Error&) {
    piece.after.clear();
  }
}

bool NcclMemory::is_free(Piece& piece) const {
  if (piece.is_taken) return false;
  if (!piece.is_ordered) order(piece);
  const auto is_over = [](const GpuEventPtr& event) { return event->is_over(); };
  if (!piece.is_ordered || !std::all_of(piece.after.begin(), piece.after.end(), is_over)) return false;
  piece.after.clear();
  return true;
}

bool NcclMemory::holds(const void* memory, size_t bytes) {
  if (made_.load(std::memory_order_acquire) == 0) return false;
  const auto* first = static_cast<const char*>(memory);
  const std::lock_guard lock(mutex_);
  return std::any_of(slabs_.begin(), slabs_.end(),
                     [&](const Slab& slab) { return first >= slab.data && first + bytes <= slab.data + slab.bytes; });
}

std::vector<std::pair<char*, size_t>> NcclMemory::slabs_after(size_t known) {
  std::vector<std::pair<char*, size_t>> slabs;
  if (known == made_.load(std::memory_order_acquire)) return slabs;
  const std::lock_guard lock(mutex_);
  for (size_t i = known; i < slabs_.size(); ++i) slabs.emplace_back(slabs_[i].data, slabs_[i].bytes);
  return slabs;
}

}  // namespace ringtrain
