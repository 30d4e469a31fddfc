// Settings of the fakes of the CUDA driver and of NCCL, read from the environment when they are first called.
//
//   RINGTRAIN_GPU_DOUBLE_GPUS            GPUs of this host; 4 by default. CUDA_VISIBLE_DEVICES is respected.
//   RINGTRAIN_GPU_DOUBLE_SLICES          so many of them, one after the other, are slices of one (MIG); 1 by default.
//   RINGTRAIN_GPU_DOUBLE_MEMORY          bytes of each GPU's memory, 1 GiB by default, without what other processes
//                                        have allocated there
//   RINGTRAIN_GPU_DOUBLE_DRIVER_VERSION  13000 by default
//   RINGTRAIN_GPU_DOUBLE_NCCL_VERSION    22703 by default. From 23000 on NCCL_MULTI_RANK_GPU_ENABLE=1 is respected.
//   RINGTRAIN_GPU_DOUBLE_DELAY_US        before each piece of work on a stream, so that missing waits show
//   RINGTRAIN_GPU_DOUBLE_GUARD           1: the host cannot touch device memory, as on a real machine. Code in the
//   place of
//                                        a kernel reaches it through `gpu_double_host_view`.
//   RINGTRAIN_GPU_DOUBLE_JOIN_TIMEOUT_S  how long ncclCommInitRankConfig and ncclCommSplit wait for the other ranks;
//                                        0, the default: for ever, as NCCL does
//   RINGTRAIN_GPU_DOUBLE_HANDSHAKE       1: a call for collectives returns when all ranks have made theirs, as NCCL's
//                                        does for some of its algorithms
//   RINGTRAIN_GPU_DOUBLE_DESTROY_US      how long ncclCommDestroy takes, as it does while another rank does not go on
//   RINGTRAIN_GPU_DOUBLE_FAIL            calls that fail: "cuMemAlloc_v2:3:2,ncclAllReduce:*:1:rank=1" is name, the
//                                        how many-th call (* is each), result, and the only rank on which it happens
//
// Symbols that a library is to lack are left out when it is linked, see test/harness/gpu_double.py.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace gpu_double {

struct PlannedFailure {
  std::string call;
  long nth;  // counted from 1; 0 is each
  int code;
};

struct Settings {
  int gpus;
  int slices;
  size_t memory_bytes;
  int driver_version;
  int nccl_version;
  long delay_us;
  bool is_guarded;
  double join_timeout_s;
  bool has_handshakes;
  long destroy_us;
  std::vector<PlannedFailure> failures;
};

// Those of this rank. `plan` is as RINGTRAIN_GPU_DOUBLE_FAIL has it.
std::vector<PlannedFailure> read_failures(const std::string& plan);

// Any thread. Ends the process with a sentence where the environment makes no sense.
const Settings& settings();

}  // namespace gpu_double
