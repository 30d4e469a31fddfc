#include "memory/gpu_memory.h"

#include <algorithm>

namespace ringtrain {
namespace {

constexpr size_t kPoolUnit = 64 << 10;

constexpr int kSuccess = 0;
constexpr size_t kNcclUnit = 512, kSlab = 32 << 20, kPage = 2 << 20;

size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void GpuBlock::is_used_until(GpuEventPtr event) {
  const Lock lock(mutex_);
  used_until_ = std::move(event);
}

GpuEventPtr GpuBlock::end_of_use() {
  const Lock lock(mutex_);
  return std::exchange(used_until_, nullptr);
}

GpuPool::~GpuPool() { free_all(); }

GpuBlockPtr GpuPool::take(size_t bytes) {
  const size_t rounded = std::max(kPoolUnit, (bytes + kPoolUnit - 1) / kPoolUnit * kPoolUnit);
  std::unique_ptr<GpuBlock> block = find(rounded);
  if (!block) block = allocate(rounded);
  if (const GpuEventPtr used_until = block->end_of_use()) used_until->let_wait(gpu_->stream());
  return owned_here(block.release(), [pool = shared_from_this()](GpuBlock* own) {
    const Lock lock(pool->mutex_);
    pool->free_.emplace_back(own);
  });
}

// The smallest that is large enough, and not much larger.
std::unique_ptr<GpuBlock> GpuPool::find(size_t bytes) {
  constexpr size_t kMuch = 4;
  const Lock lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const size_t size = (*it)->bytes_;
    if (size >= bytes && size <= kMuch * bytes && (best == free_.end() || size < (*best)->bytes_)) best = it;
  }
  if (best == free_.end()) return nullptr;
  std::unique_ptr<GpuBlock> block = std::move(*best);
  free_.erase(best);
  return block;
}

// The driver waits for the whole GPU when memory is given back, and so for what waits for other ranks: that is waited
// for with the Watch first.
std::unique_ptr<GpuBlock> GpuPool::allocate(size_t bytes) {
  const CudaDriver& driver = gpu_->driver();
  const Gpu::Current current(*gpu_);
  CudaAddress address = 0;
  int code = driver.MemAlloc(&address, bytes);
  if (CudaDriver::is_out_of_memory(code)) {
    gpu_->wait(*gpu_->record(gpu_->stream()), watch_);
    free_all();
    code = driver.MemAlloc(&address, bytes);
  }
  if (!CudaDriver::is_out_of_memory(code)) {
    driver.check(code, "cuMemAlloc");
    return std::unique_ptr<GpuBlock>(new GpuBlock(reinterpret_cast<char*>(address), bytes));
  }
  std::shared_ptr<char> memory = gpu_->pinned(bytes);
  std::unique_ptr<GpuBlock> block(new GpuBlock(memory.get(), bytes));
  block->in_host_memory_ = std::move(memory);
  return block;
}

// The driver waits until the GPU does not use it any more.
void GpuPool::free_all() {
  const Gpu::Current current(*gpu_);
  const Lock lock(mutex_);
  for (const auto& block : free_)
    if (!block->in_host_memory_) gpu_->driver().MemFree(reinterpret_cast<CudaAddress>(block->memory_));
  free_.clear();
}

NcclMemory::~NcclMemory() {
  const Gpu::Current current(*gpu_);
  for (const Slab& slab : slabs_) library_.MemFree(slab.data);
}

std::shared_ptr<char> NcclMemory::allocate(size_t bytes) {
  if (!library_.MemAlloc || !library_.CommRegister) return nullptr;
  const Gpu::Current current(*gpu_);
  const size_t rounded = rounded_up(std::max<size_t>(bytes, 1), kNcclUnit);
  set_missing_points();
  char* data = take(rounded);
  while (!data && make_slab(rounded)) data = take(rounded);
  if (!data) return nullptr;
  return owned_here(data, [memory = shared_from_this()](char* own) { memory->give_back(own); });
}

std::optional<NcclMemory::Points> NcclMemory::points_now() const {
  try {
    return Points{gpu_->record_of_user(nullptr), gpu_->record(gpu_->stream()), gpu_->record(gpu_->upload_stream())};
  } catch (const Error&) {
    return std::nullopt;
  }
}

// The moment is that after they were found: an earlier one would be too early for what is given back meanwhile.
void NcclMemory::set_missing_points() {
  const auto lacks_points = [](const Piece& piece) { return !piece.is_taken && !piece.after; };
  std::vector<const char*> lacking;
  {
    const std::lock_guard lock(mutex_);
    for (const Slab& slab : slabs_)
      for (const auto& [offset, piece] : slab.pieces)
        if (lacks_points(piece)) lacking.push_back(slab.data + offset);
  }
  if (lacking.empty()) return;
  const std::optional<Points> now = points_now();
  const std::lock_guard lock(mutex_);
  for (const char* data : lacking)
    if (Piece* piece = piece_at(data); piece && lacks_points(*piece)) piece->after = now;
}

char* NcclMemory::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
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
    if (rest > 0) slab.pieces[at->first + bytes] = {rest, false, Points()};
    at->second = {bytes, true, std::nullopt};
    return slab.data + at->first;
  }
  return nullptr;
}

bool NcclMemory::is_free(Piece& piece) {
  const auto is_over = [](const GpuEventPtr& event) { return event->is_over(); };
  if (piece.is_taken || !piece.after || !std::all_of(piece.after->begin(), piece.after->end(), is_over)) return false;
  piece.after->clear();
  return true;
}

bool NcclMemory::make_slab(size_t bytes) {
  const size_t whole = std::max(kSlab, rounded_up(bytes, kPage));
  void* data = nullptr;
  if (library_.MemAlloc(&data, whole) != kSuccess) return false;
  const std::lock_guard lock(mutex_);
  slabs_.push_back({static_cast<char*>(data), whole, {{0, {whole, false, Points()}}}});
  made_.store(slabs_.size(), std::memory_order_release);
  return true;
}

void NcclMemory::give_back(const char* data) {
  std::optional<Points> now = points_now();
  const std::lock_guard lock(mutex_);
  Piece* piece = piece_at(data);
  piece->is_taken = false;
  piece->after = std::move(now);
}

NcclMemory::Piece* NcclMemory::piece_at(const char* data) {
  for (Slab& slab : slabs_) {
    if (data < slab.data || data >= slab.data + slab.bytes) continue;
    const auto found = slab.pieces.find(static_cast<size_t>(data - slab.data));
    return found == slab.pieces.end() ? nullptr : &found->second;
  }
  return nullptr;
}

bool NcclMemory::holds(const void* memory, size_t bytes) {
  if (made_.load(std::memory_order_acquire) == 0) return false;
  const auto* first = static_cast<const char*>(memory);
  const std::lock_guard lock(mutex_);
  return std::any_of(slabs_.begin(), slabs_.end(), [&](const Slab& slab) { return slab.holds(first, bytes); });
}

void NcclMemory::note_registered(size_t slab, int key) {
  const std::lock_guard lock(mutex_);
  slabs_[slab].registered_by.insert(key);
}

void NcclMemory::note_deregistered(int key) {
  const std::lock_guard lock(mutex_);
  for (Slab& slab : slabs_) slab.registered_by.erase(key);
}

bool NcclMemory::is_registered(const void* memory, size_t bytes, int key) {
  if (made_.load(std::memory_order_acquire) == 0) return false;
  const auto* first = static_cast<const char*>(memory);
  const std::lock_guard lock(mutex_);
  return std::any_of(slabs_.begin(), slabs_.end(),
                     [&](const Slab& slab) { return slab.holds(first, bytes) && slab.registered_by.count(key) != 0; });
}

std::vector<std::pair<char*, size_t>> NcclMemory::slabs_after(size_t count) {
  std::vector<std::pair<char*, size_t>> slabs;
  if (count == made_.load(std::memory_order_acquire)) return slabs;
  const std::lock_guard lock(mutex_);
  for (size_t i = count; i < slabs_.size(); ++i) slabs.emplace_back(slabs_[i].data, slabs_[i].bytes);
  return slabs;
}

}  // namespace ringtrain
