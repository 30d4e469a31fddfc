#include "collectives/choose.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "collectives/network/hierarchical_group.h"

namespace ringtrain {
namespace {

std::unique_ptr<Group> make_node_group(const Placement& placement, const Tuning& tuning, NodeMemory memory,
                                       Watch& watch) {
  if (placement.on_node(placement.own_node()).size() == 1) return std::make_unique<SelfGroup>();
  return std::make_unique<ShmGroup>(std::move(memory), placement.place_on_node(), tuning, watch);
}

// `rates`: of each rank. `sharing`: how many ranks use the link of a host at the same time.
NetworkGroup::Setup network_setup(const std::string& algorithm, const Options& options, LinkRates rates,
                                  size_t sharing) {
  const bool is_fp16 = options.wire_format == "fp16", is_bf16 = options.wire_format == "bf16";
  const DType wire = is_fp16 ? DType::float16 : is_bf16 ? DType::bfloat16 : DType::float32;
  Link link = link_of(options);
  link.bytes_per_s /= static_cast<double>(sharing);
  const bool by_ranks = options.reduction_order == "ranks";
  return {algorithm, wire, std::move(rates), link, tuning_of(options).ring_chunk_bytes, by_ranks};
}

// Of all ranks. Those of one node share memory, or no link.
NetworkGroup::Setup flat_setup(const Placement& placement, const Options& options) {
  const size_t nodes = placement.distinct_nodes().size(), ranks = placement.ranks.size();
  return network_setup(options.allreduce_algorithm, options, placement.link_rates_of(placement.ranks),
                       nodes == 1 ? 1 : (ranks + nodes - 1) / nodes);
}

}  // namespace

NetworkGroup::Setup cross_setup(const Placement& placement, const Options& options) {
  return network_setup(options.cross_algorithm, options, placement.link_rates_of(placement.column(0)),
                       static_cast<size_t>(placement.fewest_ranks_on_a_node()));
}

LinkRates given_link_rates(const Options& options, size_t nodes) {
  LinkRates rates = link_rates_of(options.link_rates);
  if (!rates.empty() && rates.size() != nodes)
    throw invalid("link_rates=" + options.link_rates + " is for " + std::to_string(rates.size()) +
                  " hosts, but the ranks are on " + std::to_string(nodes) +
                  "; give a rate for each host, or take link_rates=auto, which also fits jobs whose hosts change");
  const bool are_alike = std::adjacent_find(rates.begin(), rates.end(), std::not_equal_to<>()) == rates.end();
  return are_alike ? LinkRates() : rates;
}

std::shared_ptr<NetworkGroup> make_network_group(Endpoint peers, const Tuning& tuning,
                                                 const NetworkGroup::Setup& setup) {
  Network& network = peers.network();
  auto group = std::make_shared<NetworkGroup>(std::move(peers), tuning, setup);
  const Network::Lending lending(&network, group);
  if (setup.algorithm == "measured") group->measure();
  return group;
}

bool wants_shared_memory(const Placement& placement, const Options& options) {
  const bool is_free = options.allreduce_algorithm == "auto" || options.allreduce_algorithm == "measured";
  return options.shared_memory == "auto" && is_free && placement.distinct_nodes().size() < placement.ranks.size();
}

std::shared_ptr<Group> choose_group(const Placement& placement, const Options& options, const Tuning& tuning,
                                    Network* network, int tag, NodeMemory memory, Watch& watch) {
  if (placement.ranks.size() == 1) return std::make_unique<SelfGroup>();
  if (memory.mailboxes.data() && placement.is_on_one_node())
    return make_node_group(placement, tuning, std::move(memory), watch);
  const auto connect = [&](const NetworkGroup::Setup& setup, const std::vector<int>& ranks, int own) {
    return make_network_group(Endpoint(*network, ranks, own, tag, &watch), tuning, setup);
  };
  auto flat = connect(flat_setup(placement, options), placement.ranks, placement.own);
  if (!memory.mailboxes.data()) return flat;

  const std::vector<int> nodes = placement.distinct_nodes();
  std::vector<std::vector<int>> ranks;
  for (const int node : nodes) ranks.push_back(placement.on_node(node));
  auto stream_watch = std::make_unique<StreamWatch>(watch);
  auto node = make_node_group(placement, tuning, std::move(memory), *stream_watch);
  const NetworkGroup::Setup across = cross_setup(placement, options);
  HierarchicalGroup::Parts parts = {
      std::move(stream_watch),
      std::move(node),
      nullptr,
      std::move(ranks),
      static_cast<int>(std::find(nodes.begin(), nodes.end(), placement.own_node()) - nodes.begin()),
      placement.fewest_ranks_on_a_node(),
      options.cross_algorithm != "mpi",
      across.by_ranks,
      across.chooser(nodes.size(), tuning)};
  if (placement.place_on_node() < parts.columns)
    parts.cross = connect(across, placement.column(static_cast<size_t>(placement.place_on_node())), parts.own_node);
  return std::make_unique<HierarchicalGroup>(std::move(parts), std::move(flat));
}

AlgorithmChoices choices_for(const Placement& placement, const Options& options, const Tuning& tuning) {
  if (placement.ranks.size() == 1) return {};
  const bool shares_memory = wants_shared_memory(placement, options);
  if (shares_memory && placement.is_on_one_node()) return ShmGroup::choices();
  const auto flat = NetworkGroup::choices(flat_setup(placement, options), tuning, placement.ranks.size());
  if (!shares_memory) return flat;
  const std::vector<int> nodes = placement.distinct_nodes();
  const int columns = placement.fewest_ranks_on_a_node();
  const bool is_even = static_cast<size_t>(columns) * nodes.size() == placement.ranks.size();
  const NetworkGroup::Setup cross = cross_setup(placement, options);
  return HierarchicalGroup::choices(
      columns, is_even, options.cross_algorithm != "mpi",
      {NetworkGroup::choices(cross, tuning, nodes.size()), flat, cross.shares_text(nodes.size()),
       cross.chooser(nodes.size(), tuning), cross.by_ranks});
}

}  // namespace ringtrain
