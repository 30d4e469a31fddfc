// float32 in two bits or one, as MXNet's gradient compression: what a code leaves out stays in the residual and goes
// with the next gradient. The same bytes as MXNet's. Independent of ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ringtrain {

struct Quantizer {
  // two_bit: threshold, -threshold or 0. one_bit: 1 above the threshold, else -1.
  enum class Kind : uint32_t { none, two_bit, one_bit };
  Kind kind = Kind::none;
  float threshold = 0.0f;  // more than 0

  bool operator==(const Quantizer& other) const { return kind == other.kind && threshold == other.threshold; }
};

// "2bit" or "1bit", MXNet's words. Throws invalid for another word, or a threshold that is not a finite number above 0.
Quantizer make_quantizer(const std::string& kind, double threshold);

// Codes come in words of 4 bytes: so many elements have one.
constexpr size_t elements_per_word(Quantizer::Kind kind) { return kind == Quantizer::Kind::two_bit ? 16 : 32; }
constexpr size_t quantized_bytes(Quantizer::Kind kind, size_t count) {
  return (count + elements_per_word(kind) - 1) / elements_per_word(kind) * 4;
}

// The residual gets the values, and keeps what the codes leave out. Neither array of `count` elements is the other one.
void quantize(const Quantizer& quantizer, const float* values, float* residual, size_t count, uint8_t* codes);

// Writes the values of the codes, or adds them to the values.
void dequantize(const Quantizer& quantizer, const uint8_t* codes, float* values, size_t count);
void add_dequantized(const Quantizer& quantizer, const uint8_t* codes, float* values, size_t count);

}  // namespace ringtrain
