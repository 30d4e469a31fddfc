// Ranks anywhere, over messages of the Network. Each operation takes the algorithm that suits its size, by numbers that
// all ranks know alike.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/options.h"
#include "collectives/group.h"
#include "collectives/network/chooser.h"
#include "collectives/network/library.h"
#include "collectives/network/pipeline.h"
#include "collectives/network/shares.h"
#include "network/endpoint.h"

namespace ringtrain {

class NetworkGroup final : public Group {
 public:
  // How its sums travel.
  struct Setup {
    std::string algorithm;        // as the option allreduce_algorithm
    DType wire = DType::float32;  // in which long sums of float32 travel
    LinkRates rates;              // of each rank
    Link link;
    // By which blocks are cut: that of the option, since autotune, which follows timing, may change the one in Tuning.
    size_t chunk_bytes = 60 << 10;
    bool by_ranks = false;  // whether floats are added up in the order of the ranks

    Shares ring_shares(size_t ranks) const { return rates.empty() ? Shares::equal(ranks) : Shares::of_ring(rates); }
    Shares exchange_shares(size_t ranks) const {
      return rates.empty() ? Shares::equal(ranks) : Shares::of_exchange(rates);
    }
    Chooser chooser(size_t ranks, const Tuning& tuning) const {
      const bool is_even = ring_shares(ranks).are_equal() && exchange_shares(ranks).are_equal();
      return {{algorithm, wire, link, is_even, by_ranks}, ranks, tuning};
    }
    // Which ranks own how much of a long sum of float32, for AlgorithmChoice; empty if equal.
    std::string shares_text(size_t ranks) const {
      const Shares shares = is_half(wire) ? exchange_shares(ranks) : ring_shares(ranks);
      return shares.are_equal() ? "" : "; of an array these own " + shares.text();
    }
  };
  // The order of `peers` is that of the ring. `tuning`, which all ranks may change between operations, outlives this.
  // All of the peers construct it at the same time.
  NetworkGroup(Endpoint peers, const Tuning& tuning, const Setup& setup);
  const char* name() const override { return "network"; }
  // Of a Group of so many ranks. Arguments as above. Operations that differ for 16-bit floats have a choice that says
  // so.
  static AlgorithmChoices choices(const Setup& setup, const Tuning& tuning, size_t size);
  static const char* const of_16_bit_floats;

  // Tries the library, and takes it for what it is clearly faster at. All ranks at the same time.
  void measure();

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  // Of pieces that are summed alike.
  void allreduce_of(const Summing& summing, const Reduction& reduction, const std::vector<Piece>& pieces);
  bool reduce_values(const Reduction& reduction, const Sources& sources, void* destination, size_t count) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void reduce_scatter_all(const Reduction& reduction, const std::vector<Scattering>& arrays) override;
  // In such a way of Chooser::for_reduce_scatter().
  void reduce_scatter_by(Way way, const Reduction& reduction, const Scattering& array);
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void allgather_all(const std::vector<Gathering>& arrays) override;
  void allgather_parts(const Parts& parts, void* destination, size_t bytes) override;
  void broadcast(void* data, size_t bytes, int root) override { broadcast_all({{data, data, bytes}}, root); }
  void broadcast_all(const std::vector<Piece>& pieces, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;

  // An allreduce of blocks that come one by one, in a way that takes blocks: release() each of them on the Stream. One
  // at a time. Sources are of the reduction's dtype, or float32 where that is a 16-bit float.
  std::unique_ptr<Stream> stream(Way way, const Summing& summing, const Reduction& reduction, DType source_dtype,
                                 const std::vector<Piece>& blocks);

 private:
  bool is_library_clearly_faster(size_t bytes, Way other);
  void reduce_arrays(Way way, const Summing& summing, const Reduction& reduction, const std::vector<Piece>& arrays);
  void reduce_in_blocks(Way way, const Summing& summing, const Reduction& reduction, const std::vector<Piece>& arrays);
  // The owner of an element follows from its place in its own array.
  void reduce_by_owners(Way way, const Summing& summing, const Reduction& reduction, const std::vector<Piece>& pieces);
  // Adds those of a part of an array.
  void cut(Way way, const Piece& array, size_t element, size_t total, std::vector<Block>& blocks) const;
  void run_in_blocks(Way way, Phases phases, const Summing& summing, const Reduction& reduction,
                     std::vector<Block> blocks);
  std::unique_ptr<Pipeline> pipeline(Way way, Phases phases, const Summing& summing, const Reduction& reduction,
                                     DType source_dtype, std::vector<Block> blocks);
  size_t chunk_elements(size_t longest_slice, size_t element, size_t blocks) const;
  // Of a block that is long enough to keep the links busy, and short enough for many to be under way. Does not follow
  // from Tuning.
  size_t block_elements(Way way, size_t total, size_t element) const;
  // The part of a block that each rank owns.
  Counts slices(Way way, size_t count) const;

  Endpoint peers_;
  const Tuning& tuning_;
  const DType wire_;
  const size_t chunk_bytes_;  // of Setup
  const Shares ring_shares_, exchange_shares_;
  Chooser chooser_;
  std::optional<Library> library_;  // where it may be a way
  Scratch packed_, slots_, mine_, theirs_, whole_;
};

}  // namespace ringtrain
