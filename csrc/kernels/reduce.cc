#include "kernels/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "kernels/copy.h"
#include "kernels/variant.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ringtrain {
namespace {

#if defined(__x86_64__)

// __builtin_cpu_supports needs a part of the compiler's own library that not every compiler brings.

// Which registers the system keeps for each process: those of 256 bits, and those of 512 besides.
constexpr unsigned kKeeps256 = 0x06, kKeeps512 = 0xe6;

// None where there is no F16C, which all variants with large registers need.
unsigned kept_registers() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE) || !(ecx & bit_F16C)) return 0;
  __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return eax;
}

bool has(unsigned registers, unsigned features) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  return (ebx & features) == features && (kept_registers() & registers) == registers;
}

bool has_avx2() { return has(kKeeps256, bit_AVX2); }

bool has_avx512() { return has_avx2() && has(kKeeps512, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL); }

// Slowest first.
std::vector<const Variant*> variants_of_this_cpu() {
  std::vector<const Variant*> variants = {&kScalarVariant};
  if (has_avx2()) variants.push_back(&kAvx2Variant);
  if (has_avx512()) variants.push_back(&kAvx512Variant);
  return variants;
}

#elif defined(__aarch64__)

std::vector<const Variant*> variants_of_this_cpu() { return {&kScalarVariant, &kNeonVariant}; }

#else

std::vector<const Variant*> variants_of_this_cpu() { return {&kScalarVariant}; }

#endif

const Variant*& variant() {
  static const Variant* chosen = variants_of_this_cpu().back();
  return chosen;
}

// In double, truncated towards zero, held at the limits of T; NaN becomes 0.
template <class T>
T scaled(T value, double factor) {
  constexpr T kLowest = std::numeric_limits<T>::min(), kHighest = std::numeric_limits<T>::max();
  const double result = static_cast<double>(value) * factor;
  if (result >= static_cast<double>(kHighest)) return kHighest;
  if (result <= static_cast<double>(kLowest)) return kLowest;
  return result == result ? static_cast<T>(result) : T{0};
}

// n where the factor is 1/n, as that of an average over n ranks; 0 elsewhere. A division by n is exact for every value,
// a multiplication by 1/n is not: 49 * (1.0 / 49) is less than 1, and a double has 53 bits.
int64_t divisor_of(double factor) {
  constexpr double kMost = 1 << 30;
  const double inverse = std::round(1.0 / factor);
  return inverse >= 2 && inverse <= kMost && 1.0 / inverse == factor ? static_cast<int64_t>(inverse) : 0;
}

template <class T, class Function>
void change_each(void* destination, const void* source, size_t count, Function change) {
  for (size_t i = 0; i < count; ++i) {  // by bytes, since the arrays need no alignment
    T value;
    std::memcpy(&value, static_cast<const char*>(source) + i * sizeof(T), sizeof(T));
    value = change(value);
    std::memcpy(static_cast<char*>(destination) + i * sizeof(T), &value, sizeof(T));
  }
}

template <class T>
void scale_integers(double factor, void* destination, const void* source, size_t count) {
  const int64_t divisor = divisor_of(factor);
  if (divisor != 0) {
    change_each<T>(destination, source, count, [&](T value) { return static_cast<T>(value / divisor); });
  } else {
    change_each<T>(destination, source, count, [&](T value) { return scaled(value, factor); });
  }
}

// Floats are scaled where they are reduced, bool is not scaled.
void scale_integers(DType dtype, double factor, void* destination, const void* source, size_t count) {
  with_integer(dtype, [&](auto number) { scale_integers<decltype(number)>(factor, destination, source, count); });
}

template <class Pointer>
std::vector<Pointer> moved(const Pointer* arrays, int array_count, size_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  std::vector<Pointer> result(arrays, arrays + array_count);
  for (Pointer& array : result) array = static_cast<Byte*>(array) + bytes;
  return result;
}

// In blocks, so that the second pass finds what the first has left in the cache.
void reduce_and_scale_integers(const Reduction& reduction, const Arrays& arrays) {
  constexpr size_t kBlockBytes = 16384;
  const size_t element = size_of(reduction.dtype), block = kBlockBytes / element;
  for (size_t start = 0; start < arrays.count; start += block) {
    const size_t count = std::min(block, arrays.count - start);
    const auto destinations = moved(arrays.destinations, arrays.destination_count, start * element);
    const auto sources = moved(arrays.sources, arrays.source_count, start * element);
    variant()->reduce(reduction, {destinations.data(), 1, sources.data(), arrays.source_count, count});
    scale_integers(reduction.dtype, reduction.scale, destinations[0], destinations[0], count);
    for (size_t copy = 1; copy < destinations.size(); ++copy) {
      std::memcpy(destinations[copy], destinations[0], count * element);
    }
  }
}

constexpr size_t kLanes = 2, kChains = 2;  // sums that do not wait for each other
typedef double Doubles __attribute__((vector_size(kLanes * sizeof(double))));

struct Chain {
  Doubles aa = {}, ab = {}, bb = {};

  template <class Number>
  void add(const Number* a, const Number* b) {
    const Doubles x = {a[0], a[1]}, y = {b[0], b[1]};
    aa += x * x;
    ab += x * y;
    bb += y * y;
  }
};

template <class Number>
Dots dots_of(const Number* a, const Number* b, size_t count) {
  Chain chains[kChains];
  size_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes)
    for (size_t chain = 0; chain < kChains; ++chain) chains[chain].add(a + i + chain * kLanes, b + i + chain * kLanes);
  Dots dots;
  for (; i < count; ++i) {
    const double x = a[i], y = b[i];
    dots.aa += x * x;
    dots.ab += x * y;
    dots.bb += y * y;
  }
  for (const Chain& chain : chains) {
    dots.aa += chain.aa[0] + chain.aa[1];
    dots.ab += chain.ab[0] + chain.ab[1];
    dots.bb += chain.bb[0] + chain.bb[1];
  }
  return dots;
}

double factor(double dot, double squared_norm) {
  static const double kNearlyZero = std::sqrt(std::numeric_limits<double>::min());  // as in Horovod
  return squared_norm < kNearlyZero ? 1.0 : 1.0 - dot / (2 * squared_norm);
}

template <class Number>
void add_adaptively(const Dots& dots, Number* a, const Number* b, size_t count) {
  const double of_a = factor(dots.ab, dots.aa), of_b = factor(dots.ab, dots.bb);
  for (size_t i = 0; i < count; ++i) a[i] = static_cast<Number>(of_a * a[i] + of_b * b[i]);
}

}  // namespace

void reduce(const Reduction& reduction, void* const* destinations, int destination_count, const void* const* sources,
            int source_count, size_t count) {
  const Arrays arrays = {destinations, destination_count, sources, source_count, count};
  const bool needs_second_pass =
      reduction.scale != 1.0 && !is_float(reduction.dtype) && reduction.dtype != DType::boolean;
  if (needs_second_pass) return reduce_and_scale_integers(reduction, arrays);
  variant()->reduce(reduction, arrays);
}

void scale(DType dtype, double factor, void* destination, const void* source, size_t count) {
  if (count == 0) return;
  if (factor == 1.0 || dtype == DType::boolean) {
    copy(destination, source, count * size_of(dtype));
    return;
  }
  if (!is_float(dtype)) return scale_integers(dtype, factor, destination, source, count);
  variant()->reduce({dtype, Reduce::sum, factor}, {&destination, 1, &source, 1, count});
}

void widen(DType dtype, float* destination, const void* source, size_t count) {
  variant()->widen(dtype, destination, source, count);
}

void narrow(DType dtype, double factor, void* destination, const float* source, size_t count) {
  variant()->narrow(dtype, factor, destination, source, count);
}

void convert(const void* source, DType from, void* destination, DType to, size_t count) {
  if (from == to)
    copy(destination, source, count * size_of(to));
  else if (is_half(from) && to == DType::float32)
    widen(from, static_cast<float*>(destination), source, count);
  else if (from == DType::float32 && is_half(to))
    narrow(to, 1.0, destination, static_cast<const float*>(source), count);
  else
    throw invalid(std::string("values of ") + name_of(from) + " cannot be " + name_of(to) + " here");
}

void choose_simd(const std::string& name) {
  const std::vector<const Variant*> variants = variants_of_this_cpu();
  std::string choices = "auto";
  for (const Variant* candidate : variants) {
    if (name == candidate->name || name == "auto") variant() = candidate;  // the last one is the fastest
    if (name == candidate->name) return;
    choices += std::string(", ") + candidate->name;
  }
  if (name != "auto") throw invalid("simd=" + name + ": not on this CPU. Choose one of " + choices + ".");
}

#if defined(__x86_64__)
KeptDenormals::KeptDenormals() : before_(__builtin_ia32_stmxcsr()) {
  constexpr unsigned kDenormalsAreZero = 0x0040, kFlushToZero = 0x8000;
  __builtin_ia32_ldmxcsr(static_cast<unsigned>(before_) & ~(kDenormalsAreZero | kFlushToZero));
}
KeptDenormals::~KeptDenormals() { __builtin_ia32_ldmxcsr(static_cast<unsigned>(before_)); }
#elif defined(__aarch64__)
KeptDenormals::KeptDenormals() {
  constexpr uint64_t kFlushToZero = 1 << 24;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
  __asm__ volatile("msr fpcr, %0" : : "r"(before_ & ~kFlushToZero));
}
KeptDenormals::~KeptDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before_)); }
#else
KeptDenormals::KeptDenormals() = default;
KeptDenormals::~KeptDenormals() = default;
#endif

const char* simd_in_use() { return variant()->name; }

Dots dots_of(DType dtype, const void* a, const void* b, size_t count) {
  return dtype == DType::float64 ? dots_of(static_cast<const double*>(a), static_cast<const double*>(b), count)
                                 : dots_of(static_cast<const float*>(a), static_cast<const float*>(b), count);
}

void add_adaptively(DType dtype, const Dots& dots, void* a, const void* b, size_t count) {
  return dtype == DType::float64 ? add_adaptively(dots, static_cast<double*>(a), static_cast<const double*>(b), count)
                                 : add_adaptively(dots, static_cast<float*>(a), static_cast<const float*>(b), count);
}

}  // namespace ringtrain
