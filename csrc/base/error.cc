#include "base/error.h"

namespace ringtrain {
namespace {

bool is_inside_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

}  // namespace

// Python takes UTF-8 only, so no character is cut in two.
std::string shortened(const std::string& text) {
  if (text.size() <= kLongestErrorText) return text;
  const std::string gap = "\n  ... " + std::to_string((text.size() - kLongestErrorText) / 1024 + 1) + " KB cut ...\n";
  size_t head = (kLongestErrorText - gap.size()) / 2, tail = text.size() - head;
  while (head > 0 && is_inside_character(text[head])) --head;
  while (tail < text.size() && is_inside_character(text[tail])) ++tail;
  return text.substr(0, head) + gap + text.substr(tail);
}

}  // namespace ringtrain
