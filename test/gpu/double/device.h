// The GPUs of this host that the process may see.
#pragma once

#include "cuda.h"

namespace gpu_double {

// Answers kNoDevice where there is none to see.
void initialize();
// Refuses with kNotInitialized before initialize() and in a forked child, with kNotPermitted on a stream's thread.
void require_initialized();

// All below: after initialize(). `device` is its ordinal among those that the process sees.
int device_count();
void require_device(CUdevice device);
CUuuid uuid_of(CUdevice device);
// Of the GPU of which it is a slice.
int whole_number_of(CUdevice device);
CUuuid whole_uuid_of(CUdevice device);
// On the host, whatever CUDA_VISIBLE_DEVICES says.
int physical_number_of(CUdevice device);

}  // namespace gpu_double
