#include "ranks.h"
namespace ringtrain {
void try_negotiation(int, uint64_t) {}
}  // namespace ringtrain
