// How torch tells C++ of a tensor without Python: DLPack's exchange API, a table of functions in a capsule.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>

#include "base/tensor.h"

namespace ringtrain {

namespace nb = nanobind;

class Exchange {
 public:
  // `__dlpack_c_exchange_api__` of a class. Nothing where its version is another one.
  static std::optional<Exchange> of(nb::handle capsule);

  // Where a tensor of torch, of exactly that class, begins if it lies in host memory, is dense and its elements are
  // these.
  std::optional<void*> address_of_same(nb::handle tensor, const TensorSpec& spec) const;

 private:
  // As DLPack writes it down, from its version 1.3 on. nanobind has the rest.
  struct Api {
    uint32_t major, minor;
    const Api* older;
    void (*unused[3])();
    int (*look)(void* object, nb::dlpack::dltensor* seen);  // borrowed; may be null
  };

  explicit Exchange(const Api& api) : api_(&api) {}

  const Api* api_;  // lives as long as the process
};

}  // namespace ringtrain
