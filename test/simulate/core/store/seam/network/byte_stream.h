// Takes the place of csrc/network/byte_stream.h in the simulation of stores: a connection is its descriptor.
#pragma once

#include "base/descriptor.h"

namespace ringtrain {

using ByteStream = Descriptor;

}  // namespace ringtrain
