#include "runtime/process_sets.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/log.h"
#include "collectives/choose.h"
#include "collectives/network/link_rates.h"
#include "network/network.h"

namespace ringtrain {

namespace {

std::string text_of(const LinkRates& rates) {
  constexpr uint64_t kKilo = 1000;
  if (rates.empty()) return "the links of all hosts are about as fast, so each has an equal share of an array";
  std::string text;
  for (const uint64_t rate : rates) text += (text.empty() ? "" : ", ") + std::to_string((rate + kKilo / 2) / kKilo);
  const Shares shares = Shares::of_ring(rates);
  return "the links of the hosts have " + text + " Mbit/s; in a ring they own " +
         (shares.are_equal() ? "equal shares" : shares.text()) + " of an array";
}

}  // namespace

ProcessSets::ProcessSets(const World& world, const Options& options, Tuning& tuning, Fabric& fabric)
    : world_(world), options_(options), tuning_(tuning), fabric_(fabric), membership_(world.size()) {
  try {
    link_rates_ = find_link_rates();
    open(0);
  } catch (const Error& error) {
    fabric_.say_last_words(error.kind(), error.what());
    throw;
  }
}

Placement ProcessSets::place(int id) const {
  const auto open = sets_.find(id);  // the world may have agreed to remove it, which its lane does not know yet
  const Membership& membership = open == sets_.end() ? membership_ : *open->second->membership;
  Placement placement = world_.place(membership.ranks(id));
  placement.set_link_rates(link_rates_);
  return placement;
}

LinkRates ProcessSets::find_link_rates() {
  const Placement placement = place(0);
  const size_t nodes = placement.distinct_nodes().size();
  if (options_.link_rates == "auto") return nodes > 2 ? measure_links(placement) : LinkRates();
  return given_link_rates(options_, nodes);
}

LinkRates ProcessSets::measure_links(const Placement& placement) {
  LinkRates rates;
  if (placement.place_on_node() == 0) {
    Endpoint peers(*fabric_.network(), placement.column(0), placement.own_node(), kFirstGroupTag, &fabric_.watch());
    rates = measure_link_rates(std::move(peers), tuning_);
  }
  Writer writer;
  writer.put(rates);
  const Bytes bytes = fabric_.channel().broadcast(writer.take());
  Reader(bytes).get(rates);
  if (world_.rank == 0) inform("link_rates=auto: " + text_of(rates));
  return rates;
}

void ProcessSets::open(int id) {
  const Placement placement = place(id);
  std::unique_ptr<Line> line = id == 0 ? nullptr : fabric_.open_line(id, placement);
  if (placement.own < 0) return;
  auto set = std::make_shared<OpenSet>();
  set->id = id;
  sets_[id] = set;
  if (id == 0) {
    set->line = &fabric_.line();
    set->tuning = &tuning_;
    set->membership = &membership_;
    group(id);
    return;
  }
  set->own_line = std::move(line);
  set->own_tuning = tuning_;
  set->own_membership = std::make_unique<Membership>(membership_.of(id));
  set->line = set->own_line.get();
  set->tuning = &set->own_tuning;
  set->membership = set->own_membership.get();
}

Group& ProcessSets::group(int id) {
  const std::shared_ptr<OpenSet>& set = sets_.at(id);
  if (!set->group) {
    const Placement placement = place(id);
    NodeMemory memory = share_memory(id, placement, *set->line->channel);
    const int tag = kFirstGroupTag + id % kGroupTags;
    set->group =
        choose_group(placement, options_, *set->tuning, fabric_.network(), tag, std::move(memory), set->line->watch);
  }
  return *set->group;
}

void ProcessSets::close(int id) {
  const auto set = sets_.find(id);
  if (set != sets_.end()) {
    set->second->group.reset();  // others may have the set for longer
    sets_.erase(set);
  }
  if (network() && network()->collectives()) network()->collectives()->free_unused(fabric_.watch());
}

std::vector<int> ProcessSets::ids() const {
  std::vector<int> ids;
  for (const auto& [id, set] : sets_) ids.push_back(id);
  return ids;
}

NodeMemory ProcessSets::share_memory(int id, const Placement& placement, Channel& channel) {
  NodeMemory memory;
  memory.arena = fabric_.arena().get();
  for (const int place : placement.on_node(placement.own_node()))
    memory.arena_members.push_back(world_.place_on_node(placement.ranks[place]));
  if (channel.size() == 1 || !wants_shared_memory(placement, options_)) return memory;
  // A node with a single rank makes a segment like the others, which nobody reads.
  const int size = std::max(static_cast<int>(memory.arena_members.size()), 2);
  memory.geometry = MailboxGeometry::of(size, static_cast<size_t>(options_.mailbox_kb * 1024), world_.cores);
  const auto bytes = [&](int) { return ShmGroup::segment_bytes(memory.geometry); };
  SegmentPlan plan = {"set" + std::to_string(id), bytes};
  // Most groups of many never stream. That of the world does, and goes through the network if there is no memory.
  if (id != 0) plan.most_reserved = ShmGroup::reserved_bytes(memory.geometry);
  if (!fabric_.node()) plan.if_it_fails = nullptr;  // that of the node has failed, and said so
  memory.mailboxes = make_segments(world_, placement, plan, channel);
  return memory;
}

}  // namespace ringtrain
