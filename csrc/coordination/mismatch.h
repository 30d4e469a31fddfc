// Do all ranks mean the same operation? If not, who means what.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "coordination/operation.h"

namespace ringtrain {

// Requests of one name, by rank. Empty if they fit together, else the sentence that all ranks get.
std::string find_mismatch(const std::map<int, Request>& requests);

// Whether what all ranks have agreed on is what one of them has asked for, but for what may differ between them.
bool are_alike(const Operation& agreed, const Operation& own);

// "rank 3", "ranks 0-2, 5"
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace ringtrain
