// HMAC-SHA256 (FIPS 180-4, RFC 2104). Its own few lines, because the core is linked against no library that has it, and
// a process may have none: what Python's hashlib uses is hidden in its module.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ringtrain {

using Sha256 = std::array<uint8_t, 32>;

Sha256 sha256(const std::string& message);
Sha256 hmac_sha256(const std::string& key, const std::string& message);

// Takes the same time wherever they differ.
bool are_equal(const Sha256& a, const Sha256& b);

}  // namespace ringtrain
