#include "kernels/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "kernels/variant.h"

namespace ringtrain {
namespace {

constexpr size_t kBlock = 1024;  // elements whose codes take a byte each before they are packed

// 11 means threshold, 10 -threshold, 00 nothing. The first element is in the highest bits of its byte.
struct TwoBits {
  static constexpr size_t kPerByte = 4, kPerWord = elements_per_word(Quantizer::Kind::two_bit);

  static uint8_t code(float threshold, float& residual) {
    // Numbers instead of branches, so that the compiler takes several elements at once.
    const int is_high = residual >= threshold, is_low = residual <= -threshold;
    residual -= threshold * static_cast<float>(is_high - is_low);
    return static_cast<uint8_t>(3 * is_high + 2 * is_low);
  }
  static float meaning(float threshold, unsigned byte, size_t place) {
    const unsigned code = byte >> (6 - 2 * place) & 3;
    return code == 3 ? threshold : code == 2 ? -threshold : 0.0f;
  }
  // Of kPerByte codes: each product brings one of them to its place in the highest byte, and none meets another.
  static uint8_t pack(const uint8_t* codes) {
    uint32_t four;
    std::memcpy(&four, codes, sizeof(four));
    return static_cast<uint8_t>(four * 0x40100401u >> 24);
  }
};

// 1 means 1, and 0 means -1.
struct OneBit {
  static constexpr size_t kPerByte = 8, kPerWord = elements_per_word(Quantizer::Kind::one_bit);

  static uint8_t code(float threshold, float& residual) {
    const bool is_high = residual > threshold;
    residual -= is_high ? 1.0f : -1.0f;
    return is_high;
  }
  static float meaning(float, unsigned byte, size_t place) { return byte >> (7 - place) & 1 ? 1.0f : -1.0f; }
  static uint8_t pack(const uint8_t* codes) {
    uint64_t eight;
    std::memcpy(&eight, codes, sizeof(eight));
    return static_cast<uint8_t>(eight * 0x8040201008040201u >> 56);
  }
};

template <class Bits>
void quantize_to(float threshold, const float* values, float* residual, size_t count, uint8_t* packed) {
  uint8_t codes[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t some = std::min(kBlock, count - begin);
    RINGTRAIN_INDEPENDENT
    for (size_t i = 0; i < some; ++i) {
      float rest = residual[begin + i] + values[begin + i];
      codes[i] = Bits::code(threshold, rest);
      residual[begin + i] = rest;
    }
    const size_t whole = (some + Bits::kPerWord - 1) / Bits::kPerWord * Bits::kPerWord;
    std::fill(codes + some, codes + whole, uint8_t{0});
    for (size_t i = 0; i < whole; i += Bits::kPerByte) *packed++ = Bits::pack(codes + i);
  }
}

// The values of each byte, so that a byte is one load and one store.
template <class Bits>
class Meanings {
 public:
  explicit Meanings(float threshold) {
    for (unsigned byte = 0; byte < kBytes; ++byte)
      for (size_t place = 0; place < Bits::kPerByte; ++place)
        values_[byte][place] = Bits::meaning(threshold, byte, place);
  }
  const float* of(uint8_t byte) const { return values_[byte]; }

 private:
  static constexpr size_t kBytes = 256;
  float values_[kBytes][Bits::kPerByte];
};

template <class Bits, class Use>
void dequantize_from(float threshold, const uint8_t* packed, float* values, size_t count, Use use) {
  const Meanings<Bits> meanings(threshold);
  size_t i = 0;
  for (; i + Bits::kPerByte <= count; i += Bits::kPerByte) {
    const float* meaning = meanings.of(*packed++);
    for (size_t place = 0; place < Bits::kPerByte; ++place) use(values[i + place], meaning[place]);
  }
  for (size_t place = 0; i < count; ++i, ++place) use(values[i], meanings.of(*packed)[place]);
}

template <class Use>
void dequantize_and(const Quantizer& quantizer, const uint8_t* codes, float* values, size_t count, Use use) {
  if (quantizer.kind == Quantizer::Kind::two_bit)
    dequantize_from<TwoBits>(quantizer.threshold, codes, values, count, use);
  else
    dequantize_from<OneBit>(quantizer.threshold, codes, values, count, use);
}

}  // namespace

Quantizer make_quantizer(const std::string& kind, double threshold) {
  Quantizer quantizer;
  if (kind == "2bit")
    quantizer.kind = Quantizer::Kind::two_bit;
  else if (kind == "1bit")
    quantizer.kind = Quantizer::Kind::one_bit;
  else
    throw invalid("there is no quantization \"" + kind + "\": give \"2bit\" or \"1bit\"");
  quantizer.threshold = static_cast<float>(threshold);
  const bool is_valid = quantizer.threshold > 0 || (kind == "1bit" && quantizer.threshold == 0);
  if (!is_valid || std::isinf(quantizer.threshold))
    throw invalid("the threshold of a quantization must be a finite number above 0, or 0 of 1bit, but is " +
                  std::to_string(threshold));
  return quantizer;
}

void quantize(const Quantizer& quantizer, const float* values, float* residual, size_t count, uint8_t* codes) {
  if (quantizer.kind == Quantizer::Kind::two_bit)
    quantize_to<TwoBits>(quantizer.threshold, values, residual, count, codes);
  else
    quantize_to<OneBit>(quantizer.threshold, values, residual, count, codes);
}

void dequantize(const Quantizer& quantizer, const uint8_t* codes, float* values, size_t count) {
  dequantize_and(quantizer, codes, values, count, [](float& value, float meaning) { value = meaning; });
}

void add_dequantized(const Quantizer& quantizer, const uint8_t* codes, float* values, size_t count) {
  dequantize_and(quantizer, codes, values, count, [](float& value, float meaning) { value += meaning; });
}

}  // namespace ringtrain
