#include "python/exchange.h"

#include <algorithm>

#include "base/dtype.h"

namespace ringtrain {
namespace {

constexpr const char* kCapsule = "dlpack_exchange_api";
constexpr uint32_t kMajor = 1;

nb::dlpack::dtype_code code_of(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  if (dtype == DType::boolean) return Code::Bool;
  if (dtype == DType::bfloat16) return Code::Bfloat;
  if (is_float(dtype)) return Code::Float;
  return is_unsigned(dtype) ? Code::UInt : Code::Int;
}

bool is_dtype(const nb::dlpack::dtype& seen, DType dtype) {
  return seen.code == static_cast<uint8_t>(code_of(dtype)) && seen.bits == 8 * size_of(dtype) && seen.lanes == 1;
}

bool is_dense(const nb::dlpack::dltensor& seen) {
  if (seen.strides == nullptr) return true;
  int64_t stride = 1;
  for (int i = seen.ndim; i-- > 0; stride *= std::max<int64_t>(seen.shape[i], 1))
    if (seen.shape[i] != 1 && seen.strides[i] != stride) return false;
  return true;
}

// A bit of torch's tensors that DLPack does not tell: their values are the negative ones of what lies in memory.
bool is_negative(nb::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const nb::object answer = nb::steal(PyObject_CallMethodObjArgs(tensor.ptr(), name, nullptr));
  if (!answer.is_valid()) PyErr_Clear();
  return answer.ptr() != Py_False;
}

}  // namespace

std::optional<Exchange> Exchange::of(nb::handle capsule) {
  const auto* api = static_cast<const Api*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
  if (api == nullptr) throw nb::python_error();
  while (api != nullptr && api->major != kMajor) api = api->older;
  return api != nullptr && api->look != nullptr ? std::optional(Exchange(*api)) : std::nullopt;
}

std::optional<void*> Exchange::address_of_same(nb::handle tensor, const TensorSpec& spec) const {
  nb::dlpack::dltensor seen;
  if (api_->look(tensor.ptr(), &seen) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const bool is_same = seen.device.device_type == nb::device::cpu::value && is_dtype(seen.dtype, spec.dtype) &&
                       static_cast<size_t>(seen.ndim) == spec.shape.size() &&
                       std::equal(spec.shape.begin(), spec.shape.end(), seen.shape) && is_dense(seen) &&
                       !is_negative(tensor);
  return is_same ? std::optional<void*>(static_cast<char*>(seen.data) + seen.byte_offset) : std::nullopt;
}

}  // namespace ringtrain
