// Chunks of a Part as bytes, whole: for a server that writes down what it keeps, and one that takes its place.
#pragma once

#include <cstddef>

#include "base/bytes.h"
#include "kvstore/store/actor.h"

namespace ringtrain {

// Chunks [first, last), each as it is between two changes: what is counted, values, and what the rule remembers. Pushes
// of rounds that are open are not among them. `actor`: the server's. Throws stalled where another process keeps one.
Bytes copy_chunks(Actor& actor, size_t first, size_t last, double timeout_s);

// Puts them back where the same rule is; returns the number of the next chunk. Throws failure for other bytes.
size_t put_chunks(Actor& actor, size_t first, const Bytes& bytes, double timeout_s);

}  // namespace ringtrain
