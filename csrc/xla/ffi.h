// The part of XLA's foreign function interface that is used, written down: xla/ffi/api/c_api.h, versions 0.1 to 0.5.
// Its layouts only grow, and every struct says its own size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringtrain::xla {

// Extensions that may be appended to a struct.
struct Extension {
  static constexpr int kMetadata = 1;

  size_t size;
  int type;
  Extension* next;
};

struct Version {
  size_t size;
  Extension* extension;
  int major, minor;
};

struct Metadata {
  size_t size;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

enum class Element : int {
  boolean = 1,
  int8 = 2,
  int16 = 3,
  int32 = 4,
  int64 = 5,
  uint8 = 6,
  uint16 = 7,
  uint32 = 8,
  uint64 = 9,
  float16 = 10,
  float32 = 11,
  float64 = 12,
  complex64 = 15,
  bfloat16 = 16,
  complex128 = 18,
};

struct Buffer {
  size_t size;
  Extension* extension;
  Element element;
  void* data;
  int64_t rank;
  int64_t* dimensions;
};

struct Bytes {
  const char* begin;
  size_t length;
};

struct Scalar {
  Element element;
  void* value;
};

struct Arguments {  // and results
  size_t size;
  Extension* extension;
  int64_t count;
  int* types;
  void** items;
};

struct Attributes {
  size_t size;
  Extension* extension;
  int64_t count;
  int* types;
  Bytes** names;
  void** items;
};

struct Failure;  // XLA's
struct Future;   // XLA's

// Those of https://abseil.io/docs/cpp/guides/status-codes.
enum class Code : int { invalid_argument = 3, deadline_exceeded = 4, aborted = 10, internal = 13, unavailable = 14 };

struct FailureCreate {
  size_t size;
  Extension* extension;
  const char* message;
  Code code;
};

struct FutureCreate {
  size_t size;
  Extension* extension;
  Future* future;
};

struct FutureSetAvailable {
  size_t size;
  Extension* extension;
  Future* future;
};

struct FutureSetError {
  size_t size;
  Extension* extension;
  Future* future;
  Failure* failure;
};

struct StreamGet {
  size_t size;
  Extension* extension;
  void* context;
  void* stream;  // of the GPU: where the program runs
};

struct RunIdGet;  // not used

struct DeviceOrdinalGet {
  size_t size;
  Extension* extension;
  void* context;
  int32_t ordinal;  // among the devices of this process
};

struct Api {
  size_t size;
  Extension* extension;
  Version version;
  const void* internal;
  Failure* (*create_failure)(FailureCreate*);
  void *get_message, *destroy_failure, *register_handler;
  Failure* (*get_stream)(StreamGet*);
  void *register_type, *get_context, *set_state, *get_state, *allocate, *free, *schedule, *count_threads;
  Failure* (*create_future)(FutureCreate*);
  Failure* (*set_available)(FutureSetAvailable*);
  Failure* (*set_error)(FutureSetError*);
  Failure* (*get_run_id)(RunIdGet*);
  Failure* (*get_device_ordinal)(DeviceOrdinalGet*);
};

struct CallFrame {
  static constexpr int kExecute = 3;

  size_t size;
  Extension* extension;
  const Api* api;
  void* context;
  int stage;
  Arguments arguments, results;
  Attributes attributes;
  Future* future;  // a handler that returns before its work is done leaves one here
};

}  // namespace ringtrain::xla
