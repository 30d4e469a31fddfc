// Ranks anywhere, over messages of the Network. Each operation takes the algorithm that suits its size, by numbers that
// all ranks know alike.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/options.h"
#include "collectives/group.h"
#include "collectives/network/library.h"
#include "collectives/network/pipeline.h"
#include "network/endpoint.h"

namespace ringtrain {

class NetworkGroup final : public Group {
 public:
  // The order of `peers` is that of the ring. `algorithm`: as the option allreduce_algorithm. `tuning`, which all ranks
  // may change between operations, outlives this. `wire`: in what dtype long sums of float32 travel. All of the peers
  // construct it at the same time.
  NetworkGroup(Endpoint peers, const std::string& algorithm, const Tuning& tuning, DType wire = DType::float32);
  const char* name() const override { return "network"; }
  // Of a Group of so many ranks. Arguments as above. Operations that differ for 16-bit floats have a choice that says
  // so.
  static AlgorithmChoices choices(const std::string& algorithm, const Tuning& tuning, size_t size, DType wire);
  static const char* const of_16_bit_floats;

  // Tries the library, and takes it for what it is clearly faster at. All ranks at the same time.
  void measure();

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void reduce_scatter_all(const Reduction& reduction, const std::vector<Scattering>& arrays) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void allgather_all(const std::vector<Gathering>& arrays) override;
  void allgather_parts(const Parts& parts, void* destination, size_t bytes) override;
  void broadcast(void* data, size_t bytes, int root) override { broadcast_all({{data, data, bytes}}, root); }
  void broadcast_all(const std::vector<Piece>& pieces, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;

  // An allreduce of blocks that come one by one: release() each of them on the Stream. One at a time. Sources are of
  // the reduction's dtype, or float32 where that is a 16-bit float.
  std::unique_ptr<Stream> stream(const Reduction& reduction, DType source_dtype, std::vector<Block> blocks);

 private:
  enum class Way { ring, doubling, library };
  struct Ways {
    Way small, large;  // large: from Tuning::ring_from_bytes on

    static Ways of(const std::string& algorithm);
    // Operations that only move data. A ring that an option asks for is taken for all sizes.
    bool has_short_moves() const { return small != Way::ring; }
  };

  Way way_for(const Reduction& reduction, size_t count) const;
  bool is_library_clearly_faster(size_t bytes, Way other);
  void reduce_arrays(Way way, const Reduction& reduction, const std::vector<Piece>& arrays);
  void reduce_by_ring(const Reduction& reduction, const std::vector<Piece>& arrays);
  void run_ring(Phases phases, const Reduction& reduction, std::vector<Block> blocks);
  // By the ring, or by the exchange where a ring would round too often.
  std::unique_ptr<Pipeline> pipeline(Phases phases, const Reduction& reduction, DType source_dtype,
                                     std::vector<Block> blocks);
  size_t chunk_elements(size_t longest_slice, size_t element) const;
  // Of a block that is long enough to keep the links busy, and short enough for many to be under way.
  size_t block_elements(DType dtype) const;

  Endpoint peers_;
  const Tuning& tuning_;
  const DType wire_;
  Ways ways_;
  std::optional<Library> library_;  // where it may be a way
  Scratch packed_, slots_, mine_, theirs_, whole_;
};

}  // namespace ringtrain
