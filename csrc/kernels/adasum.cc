#include "kernels/adasum.h"

#include <cmath>
#include <limits>

namespace ringtrain {
namespace {

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

Dots dots_of(DType dtype, const void* a, const void* b, size_t count) {
  return dtype == DType::float64 ? dots_of(static_cast<const double*>(a), static_cast<const double*>(b), count)
                                 : dots_of(static_cast<const float*>(a), static_cast<const float*>(b), count);
}

void add_adaptively(DType dtype, const Dots& dots, void* a, const void* b, size_t count) {
  return dtype == DType::float64 ? add_adaptively(dots, static_cast<double*>(a), static_cast<const double*>(b), count)
                                 : add_adaptively(dots, static_cast<float*>(a), static_cast<const float*>(b), count);
}

}  // namespace ringtrain
