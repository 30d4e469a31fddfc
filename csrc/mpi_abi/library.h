// XLA's own collectives on CPUs, carried by this process's Engine: jit with NamedSharding, shard_map, pmap.
//
// XLA calls them through MPItrampoline, which jaxlib holds: a C ABI, whose names it looks up in the library that the
// variable MPITRAMPOLINE_LIB names. This binary is such a library. It has every name of that ABI (names.h), and behind
// the fifteen functions that XLA calls a communicator is a process set.
#pragma once

namespace ringtrain::mpi_abi {

// Any thread. Whether MPItrampoline has loaded this binary, which it does once: when jaxlib is loaded.
bool is_loaded();
// Before XLA makes its devices, and after the Engine was made: from now on its ranks are those of MPI_COMM_WORLD.
void attach(int rank, int size);
// Any thread. Whether programs of XLA have sent anything: with the first one a mesh of devices gets a communicator.
bool has_meshes();

}  // namespace ringtrain::mpi_abi
