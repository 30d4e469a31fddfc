// MPI as a Network, whichever library mpi4py has loaded, through the few functions that ringtrain calls.
//
// Nothing is compiled against an mpi.h. The MPI libraries of this world differ in the width of a handle (4 bytes in the
// MPICH family, 8 in Open MPI and in the standard ABI of MPI 5) and in the values of their constants. The width is a
// template parameter of the one implementation; the constants and handles are data that ringtrain/job/mpi.py takes from
// mpi4py. MPI_Status has three sizes, so none is ever read: every call gets scratch memory large enough for all.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/placement.h"
#include "network/network.h"

namespace ringtrain {

// The description of the library by ringtrain/job/mpi.py.
struct MpiDescription {
  std::string library;                       // path of the libmpi that is loaded in this process
  int handle_bytes = 0;                      // 4 or 8
  uint64_t communicator = 0;                 // a duplicate made for ringtrain alone; mpi4py frees it
  std::map<std::string, uint64_t> handles;   // "float32", "sum", ...: datatypes and operations
  std::map<std::string, int64_t> constants;  // "any_source", "in_place" (an address), "err_proc_failed", ...
};

// `names` of all ranks of the world, to say who has failed. Has LibraryCollectives.
std::unique_ptr<Network> open_mpi(const MpiDescription& description, const std::vector<RankName>& names);

}  // namespace ringtrain
