// Ranks on several nodes: what they do inside a node goes through shared memory, and between the nodes each value
// crosses a node's link once, in as few messages as there are nodes.
//
// A node has as many columns as the node with the fewest ranks. A column is the ranks of the same place on all nodes.
// In an allreduce each column owns a slice of every block, which is reduced inside each node first, then between the
// nodes, and then gathered inside the nodes. The three stages overlap: while blocks are on the wire, those behind them
// are reduced and those before them gathered in shared memory. How the other operations are divided between the levels
// is said above each in hierarchical_group.cc; where nodes have different numbers of ranks, some are left to the flat
// Group.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collectives/group.h"
#include "collectives/network/network_group.h"
#include "collectives/network/pipeline.h"

namespace ringtrain {

class HierarchicalGroup final : public Group {
 public:
  struct Parts {
    std::unique_ptr<StreamWatch> watch;   // of `node`
    std::unique_ptr<Group> node;          // the ranks of this node
    std::shared_ptr<NetworkGroup> cross;  // those with this rank's place on every node; null when it has no column
    // Of the Group, by node, and on a node by place.
    std::vector<std::vector<int>> ranks;
    int own_node, columns;
    bool may_overlap;  // the same on all ranks
    bool by_ranks;     // whether floats are added up in the order of the ranks, which those of a node may not follow
    // Of `cross`, for ranks without one, too.
    Chooser chooser;

    struct Seat {
      int node, place;
    };
    Seat seat_of(int rank) const;
    int nodes() const { return static_cast<int>(ranks.size()); }
    // This rank among those of its node.
    size_t place() const { return static_cast<size_t>(node->rank()); }
    // Whether every rank has a column.
    bool is_even() const;
    // The part of `counts`, of all ranks, that belongs to this rank's column, by node.
    Counts of_own_column(const Counts& counts) const;
    // The part of `count` elements that each rank of the node owns.
    Counts column_counts(size_t count) const;
  };
  // `flat`: all ranks, for what suits no hierarchy.
  HierarchicalGroup(Parts parts, std::shared_ptr<Group> flat)
      : Group(flat->rank(), flat->size()), parts_(std::move(parts)), flat_(std::move(flat)) {}
  const char* name() const override { return "hierarchical"; }
  // Of its parts.
  struct PartChoices {
    AlgorithmChoices cross, flat;
    std::string shares;  // NetworkGroup::Setup::shares_text() of `cross`
    Chooser chooser;     // of `cross`
    bool by_ranks;
  };
  static AlgorithmChoices choices(int columns, bool is_even, bool may_overlap, const PartChoices& parts);

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  size_t node_sum_bytes(const Reduction& reduction, size_t count) const override;
  NodeSum add_on_node(const Reduction& reduction, const void* source, size_t count) override;
  void add_nodes(const Reduction& reduction, const Sources& sums, void* destination, size_t count) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                      const Counts& counts) override {
    reduce_scatter_all(reduction, {{source, destination, counts}});
  }
  void reduce_scatter_all(const Reduction& reduction, const std::vector<Scattering>& arrays) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void allgather_all(const std::vector<Gathering>& arrays) override;
  void broadcast(void* data, size_t bytes, int root) override { broadcast_all({{data, data, bytes}}, root); }
  void broadcast_all(const std::vector<Piece>& pieces, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;
  Levels levels() override { return {parts_.node.get(), parts_.cross.get(), parts_.nodes(), parts_.columns}; }

 private:
  class Overlapped;

  // With so many elements.
  bool may_overlap(DType dtype, size_t count) const;
  bool adds_by_ranks(const Reduction& reduction) const { return parts_.by_ranks && is_float(reduction.dtype); }

  Summing summing_of(const Reduction& reduction, size_t count) const;
  void reduce_arrays(const Summing& summing, const Reduction& reduction, const std::vector<Piece>& arrays);
  // The stages one after the other.
  void reduce_array(const Summing& summing, const Reduction& reduction, const Piece& array);
  void reduce_scatter_by(Way way, const Reduction& reduction, const Scattering& array);

  const Parts parts_;
  const std::shared_ptr<Group> flat_;
  Scratch packed_, wide_, wide_slices_, run_, own_column_, arrived_, node_sum_, tree_;
};

}  // namespace ringtrain
