// The handlers that XLA calls in programs for GPUs: as handlers.h, in the order of XLA's stream.
//
// XLA puts the work of a program into one stream, from one thread of the host, in an order that is the same in every
// execution. Arrays are addresses on the GPU, which no handler can read. So a ticket says nothing there but what comes
// after what, and what was started waits under its name. start() notes where the stream is, and submits. finish() keeps
// the thread until the engine has put the operations into streams of its own, and has XLA's stream wait for those: the
// host goes on while the GPU works.
#pragma once

#include "xla/ffi.h"

namespace ringtrain::xla::on_gpu {

// The one thread of XLA's. Arrays and results as of those for CPUs.
Failure* start(CallFrame* frame);
Failure* finish(CallFrame* frame);
Failure* require_finite(CallFrame* frame);

}  // namespace ringtrain::xla::on_gpu
