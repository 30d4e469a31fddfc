// Which Group carries out what, by where the ranks are and by what the options force.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/options.h"
#include "base/placement.h"
#include "base/wait.h"
#include "collectives/group.h"
#include "collectives/network/network_group.h"
#include "collectives/network/shares.h"
#include "collectives/shm/shm_group.h"
#include "network/endpoint.h"

namespace ringtrain {

// Whether a segment between the ranks of this rank's node is of use: where not, none need be made.
bool wants_shared_memory(const Placement& placement, const Options& options);

// The rates of each of so many nodes that link_rates gives; nothing where it is a word, or all are alike. Throws
// Error(invalid) where it does not give as many.
LinkRates given_link_rates(const Options& options, size_t nodes);

// Between the nodes of a hierarchy, for any column: all of them use the links of the same nodes.
NetworkGroup::Setup cross_setup(const Placement& placement, const Options& options);

// Between ranks that share no memory, or are not to use it. Arguments as those of NetworkGroup.
std::shared_ptr<NetworkGroup> make_network_group(Endpoint peers, const Tuning& tuning,
                                                 const NetworkGroup::Setup& setup);

// `memory`: shared by this rank's node; without mailboxes when there are none, which then holds on all nodes.
// `network`: null when the placement is a single rank. `tag`: keeps the messages of this process set apart. `tuning`
// outlives the Group. All ranks of the placement call this at the same time.
std::shared_ptr<Group> choose_group(const Placement& placement, const Options& options, const Tuning& tuning,
                                    Network* network, int tag, NodeMemory memory, Watch& watch);

// Returns the choices of that Group and of the Groups in it for each operation, if the ranks of a node can share
// memory.
AlgorithmChoices choices_for(const Placement& placement, const Options& options, const Tuning& tuning);

}  // namespace ringtrain
