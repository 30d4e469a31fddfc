// Operations of ringtrain as operations of MXNet's dependency engine.
//
// MXNet begins one when its arrays are computed, on a worker of its own, which only submits it and goes on: so workers
// never wait for other ranks, and the ranks' engines may run what is ready in any order. The thread that finishes the
// Handle tells MXNet, which then lets go of those who wait for the arrays.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "coordination/operation.h"
#include "mxnet/library.h"

namespace ringtrain {

// Before all else. The library stays loaded.
void use_mxnet(const MxnetLibrary& library);

// Any thread. `request` has a name and lacks the tensors: these are NDArrays in the host's memory, by their handles,
// which may be freed at once. Without `inputs` the outputs are worked on in place; else there are as many, and none is
// in both. Throws failure for what MXNet refuses; any other error is thrown where an output is read, in
// words that begin with the name of the exception.
void push_to_mxnet(Request request, const std::vector<void*>& inputs, std::vector<void*> outputs);

// How many MXNet has not been told to be done.
int pending_in_mxnet();

// With what the operations ended that were pushed since the last call of forget_mxnet_failure(), if the engine ended
// with it.
std::optional<Error> mxnet_failure();
void forget_mxnet_failure();

}  // namespace ringtrain
