// Text in JSON.
#pragma once

#include <cstdio>
#include <string>

namespace ringtrain {

// The text as a string of JSON.
inline std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", static_cast<unsigned char>(c));
      result += code;
    } else {
      result += c;
    }
  }
  return result + "\"";
}

}  // namespace ringtrain
