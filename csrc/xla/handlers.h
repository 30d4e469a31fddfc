// The handlers that XLA calls in programs for CPUs: start() hands an operation to the engine and never waits, finish()
// waits for what was started.
//
// A program has one start() for each array and one finish() for all that belongs together. So each array is on its way
// as soon as it has its values, and since finish() takes all of them, XLA uses none of their memory meanwhile.
#pragma once

#include <memory>
#include <vector>

#include "record/handle.h"
#include "xla/ffi.h"

namespace ringtrain::xla {

// Any thread of XLA's.
// (array) -> (the same array in place, ticket) for allreduce and broadcast, (array) -> (ticket) for what has a result
// of another shape, (any arrays) -> (ticket) for barrier; of messages (arrays to send, ...) -> (received arrays, one
// ticket for all), which are complete in finish().
Failure* start(CallFrame* frame);
// (arrays, their tickets, any other tickets) -> (results). An array that was changed in place is its own result.
Failure* finish(CallFrame* frame);
// (array, flags) -> (the same array in place): the flags, int32 of one number for each name, are 0 for what is finite,
// else a place in the list of ranks, counted from its end.
Failure* require_finite(CallFrame* frame);
// (array, flags) -> (the same array in place): a flag, int32 of one number for each name, is 0 for what all ranks have.
Failure* report_differences(CallFrame* frame);

// Returns the operations that programs wait for now, in finish().
std::vector<std::shared_ptr<Handle>> awaited();
// Whether all that was started is over, after at most so many seconds.
bool wait_for_all(double timeout_s);

}  // namespace ringtrain::xla

// In programs for GPUs, in the order of XLA's stream.
//
// XLA puts the work of a program into one stream, from one thread of the host, in an order that is the same in every
// execution. Arrays are addresses on the GPU, which no handler can read. So a ticket says nothing there but what comes
// after what, and what was started waits under its name. start() notes where the stream is, and submits. finish() keeps
// the thread until the engine has put the operations into streams of its own, and has XLA's stream wait for those: the
// host goes on while the GPU works.
namespace ringtrain::xla::on_gpu {

// The one thread of XLA's. Arrays and results as of those for CPUs.
Failure* start(CallFrame* frame);
Failure* finish(CallFrame* frame);
Failure* require_finite(CallFrame* frame);
// Looks at the flags in the executions 1, 2, 4, 8 and so on of this process, in which the host waits for the GPU.
Failure* report_differences(CallFrame* frame);

}  // namespace ringtrain::xla::on_gpu
