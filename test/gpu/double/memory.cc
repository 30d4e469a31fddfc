#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "call.h"
#include "settings.h"

namespace gpu_double {
namespace {

constexpr size_t kPage = 4096;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

char* require_mapped(void* address) {
  if (address == MAP_FAILED) throw Refusal{result::kOutOfMemory, "mmap failed"};
  return static_cast<char*>(address);
}

char* map_plain(size_t bytes) {
  return require_mapped(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

// The same pages twice: at an address that nobody may touch, and where the double finds them.
Block map_guarded(size_t bytes) {
  const int file = memfd_create("device memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) throw Refusal{result::kOutOfMemory, "no memfd"};
  Block block{};
  block.view = require_mapped(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  block.begin = reinterpret_cast<uintptr_t>(require_mapped(mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0)));
  close(file);
  return block;
}

Block map_device_memory(size_t bytes) {
  if (settings().is_guarded) return map_guarded(bytes);
  Block block{};
  block.view = map_plain(bytes);
  block.begin = reinterpret_cast<uintptr_t>(block.view);
  return block;
}

// The pages are given back; the addresses stay taken, and touching them ends the process.
void unmap_device_memory(const Block& block) {
  const size_t bytes = whole_pages(block.bytes);
  char* const begin = reinterpret_cast<char*>(block.begin);
  if (block.view != begin) munmap(block.view, bytes);
  mmap(begin, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

}  // namespace

uintptr_t Memory::allocate(CUdevice device, size_t bytes) {
  if (bytes == 0) throw Refusal{result::kInvalidValue, "no bytes"};
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t left = settings().memory_bytes - sum_of_used_bytes(device);
  if (whole_pages(bytes) > left) throw Refusal{result::kOutOfMemory, "the GPU's memory is full"};
  Block block = map_device_memory(whole_pages(bytes));
  block.bytes = bytes;
  block.kind = MemoryKind::device;
  block.device = device;
  add(block);
  return block.begin;
}

void Memory::free(uintptr_t begin) {
  const std::lock_guard<std::mutex> lock(mutex_);
  unmap_device_memory(take(begin, MemoryKind::device, result::kInvalidValue));
}

uintptr_t Memory::allocate_pinned(CUdevice device, size_t bytes) {
  if (bytes == 0) throw Refusal{result::kInvalidValue, "no bytes"};
  char* const view = map_plain(whole_pages(bytes));
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto begin = reinterpret_cast<uintptr_t>(view);
  add({begin, bytes, MemoryKind::pinned, device, view});
  return begin;
}

void Memory::free_pinned(uintptr_t begin) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Block block = take(begin, MemoryKind::pinned, result::kInvalidValue);
  munmap(block.view, whole_pages(block.bytes));
}

void Memory::register_host(CUdevice device, uintptr_t begin, size_t bytes) {
  if (begin == 0 || bytes == 0) throw Refusal{result::kInvalidValue, "no bytes"};
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto after = blocks_.lower_bound(begin + bytes);
  const Block* const last = after == blocks_.begin() ? nullptr : &std::prev(after)->second;
  if (last != nullptr && last->begin + last->bytes > begin) {
    const bool is_device_memory = last->kind == MemoryKind::device;
    throw Refusal{is_device_memory ? result::kInvalidValue : result::kHostMemoryAlreadyRegistered, "known already"};
  }
  add({begin, bytes, MemoryKind::registered, device, reinterpret_cast<char*>(begin)});
}

void Memory::unregister_host(uintptr_t begin) {
  const std::lock_guard<std::mutex> lock(mutex_);
  take(begin, MemoryKind::registered, result::kHostMemoryNotRegistered);
}

void Memory::free_all_of(CUdevice device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = blocks_.begin(); at != blocks_.end();) {
    const Block block = (at++)->second;
    if (block.device != device) continue;
    take(block.begin, block.kind, result::kInvalidValue);
    if (block.kind == MemoryKind::device) unmap_device_memory(block);
    if (block.kind == MemoryKind::pinned) munmap(block.view, whole_pages(block.bytes));
  }
}

char* Memory::view(uintptr_t begin, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Block* const block = block_at(begin);
  const bool is_within = block != nullptr && bytes <= block->bytes - (begin - block->begin);
  return is_within ? block->view + (begin - block->begin) : nullptr;
}

bool Memory::find(uintptr_t address, Block& found) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Block* const block = block_at(address);
  if (block != nullptr) found = *block;
  return block != nullptr;
}

bool Memory::touches_device_memory(uintptr_t begin, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = blocks_.lower_bound(begin); at != blocks_.end() && at->first < begin + bytes; ++at)
    if (at->second.kind == MemoryKind::device) return true;
  const Block* const block = block_at(begin);
  return block != nullptr && block->kind == MemoryKind::device;
}

size_t Memory::used_bytes(CUdevice device) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sum_of_used_bytes(device);
}

size_t Memory::count_device_blocks() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_device = [](const auto& one) { return one.second.kind == MemoryKind::device; };
  return static_cast<size_t>(std::count_if(blocks_.begin(), blocks_.end(), is_device));
}

size_t Memory::pinned_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return pinned_bytes_;
}

size_t Memory::most_pinned_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return most_pinned_bytes_;
}

Block Memory::take(uintptr_t begin, MemoryKind kind, int refusal) {
  const auto found = blocks_.find(begin);
  if (found == blocks_.end() || found->second.kind != kind) throw Refusal{refusal, "not the begin of such memory"};
  const Block block = found->second;
  blocks_.erase(found);
  if (kind != MemoryKind::device) pinned_bytes_ -= block.bytes;
  return block;
}

void Memory::add(const Block& block) {
  blocks_[block.begin] = block;
  if (block.kind == MemoryKind::device) return;
  pinned_bytes_ += block.bytes;
  most_pinned_bytes_ = std::max(most_pinned_bytes_, pinned_bytes_);
}

const Block* Memory::block_at(uintptr_t address) const {
  const auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return nullptr;
  const Block& block = std::prev(after)->second;
  return address < block.begin + block.bytes ? &block : nullptr;
}

size_t Memory::sum_of_used_bytes(CUdevice device) const {
  size_t bytes = 0;
  for (const auto& [begin, block] : blocks_)
    if (block.kind == MemoryKind::device && block.device == device) bytes += whole_pages(block.bytes);
  return bytes;
}

Memory& memory() {
  static auto* const one = new Memory;
  return *one;
}

}  // namespace gpu_double
