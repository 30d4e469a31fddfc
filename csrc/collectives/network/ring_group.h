// Ranks anywhere, over MPI point-to-point messages: uses every link in both directions all the time.
#pragma once

#include <memory>
#include <vector>

#include "base/tuning.h"
#include "collectives/network/blocks.h"
#include "collectives/network/flat_group.h"
#include "collectives/network/peers.h"
#include "collectives/network/pipeline.h"

namespace ringtrain {

class RingGroup final : public FlatGroup {
 public:
  // The order of `peers` is that of the ring. `tuning` outlives this. Nothing is sent here.
  RingGroup(Peers peers, const Tuning& tuning)
      : FlatGroup(peers.rank(), peers.size()), peers_(std::move(peers)), tuning_(tuning) {}
  const char* name() const override { return "ring"; }

  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;

  // An allreduce of blocks that come one by one: release() each of them on the Stream. One at a time. Sources are of
  // the reduction's dtype, or float32 where that is a 16-bit float.
  std::unique_ptr<Stream> stream(const Reduction& reduction, DType source_dtype, std::vector<Block> blocks);

 private:
  void reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays) override;

  std::unique_ptr<Pipeline> pipeline(Part part, const Reduction& reduction, DType source_dtype,
                                     std::vector<Block> blocks);
  void run(Part part, const Reduction& reduction, std::vector<Block> blocks);
  size_t chunk_elements(size_t longest_slice, size_t element) const;
  // Of a block that is long enough to keep the links busy, and short enough for many to be under way.
  size_t block_elements(DType dtype) const;

  Peers peers_;
  const Tuning& tuning_;
  Scratch slots_, whole_;
};

}  // namespace ringtrain
