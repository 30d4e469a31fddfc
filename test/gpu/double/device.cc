#include "device.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "call.h"
#include "settings.h"
#include "stream.h"

namespace gpu_double {
namespace {

std::atomic<bool> is_initialized{false};
std::atomic<bool> is_forked_from_a_user{false};

// FNV-1a: spreads the bits of host name and number over the UUID.
uint64_t digest(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211u;
  return hash;
}

CUuuid physical_uuid(int number) {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  const std::string name = std::string(host) + "/" + std::to_string(number);
  CUuuid uuid;
  for (int half = 0; half < 2; ++half) {
    uint64_t bits = digest(std::to_string(half) + name);
    for (int byte = 0; byte < 8; ++byte, bits >>= 8) uuid.bytes[8 * half + byte] = static_cast<unsigned char>(bits);
  }
  return uuid;
}

std::string text_of(const CUuuid& uuid) {
  std::string text = "GPU-";
  for (int byte = 0; byte < 16; ++byte) {
    if (byte == 4 || byte == 6 || byte == 8 || byte == 10) text += '-';
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", uuid.bytes[byte]);
    text += digits;
  }
  return text;
}

// -1 for what names no GPU of this host.
int physical_number_named(const std::string& name) {
  if (name.rfind("GPU-", 0) == 0) {
    for (int number = 0; number < settings().gpus; ++number)
      if (text_of(physical_uuid(number)).rfind(name, 0) == 0) return number;
    return -1;
  }
  char* end = nullptr;
  const long number = std::strtol(name.c_str(), &end, 10);
  return end != name.c_str() && *end == '\0' && number >= 0 && number < settings().gpus ? static_cast<int>(number) : -1;
}

// As CUDA reads it: what follows the first name of no GPU is not looked at.
std::vector<int> find_visible() {
  std::vector<int> visible;
  const char* names = std::getenv("CUDA_VISIBLE_DEVICES");
  if (names == nullptr) {
    for (int number = 0; number < settings().gpus; ++number) visible.push_back(number);
    return visible;
  }
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    const int number = physical_number_named(name);
    if (number < 0) break;
    visible.push_back(number);
  }
  return visible;
}

const std::vector<int>& visible() {
  static const auto* const found = new std::vector<int>(find_visible());
  return *found;
}

}  // namespace

void initialize() {
  if (is_forked_from_a_user) throw Refusal{result::kNotInitialized, "a forked child of a process that used the driver"};
  if (visible().empty()) throw Refusal{result::kNoDevice, "no GPU"};
  static std::once_flag once;
  // The threads of the streams do not follow into a child.
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] {
      is_initialized = false;
      is_forked_from_a_user = true;
    });
  });
  is_initialized = true;
}

void require_initialized() {
  if (is_stream_thread()) throw Refusal{result::kNotPermitted, "a host function calls the driver"};
  if (!is_initialized) throw Refusal{result::kNotInitialized, "cuInit was not called by this process"};
}

int device_count() { return static_cast<int>(visible().size()); }

void require_device(CUdevice device) {
  if (device < 0 || device >= device_count()) throw Refusal{result::kInvalidDevice, "no such GPU"};
}

CUuuid uuid_of(CUdevice device) { return physical_uuid(physical_number_of(device)); }

int whole_number_of(CUdevice device) { return physical_number_of(device) / settings().slices; }

CUuuid whole_uuid_of(CUdevice device) { return physical_uuid(whole_number_of(device) * settings().slices); }

int physical_number_of(CUdevice device) { return visible()[static_cast<size_t>(device)]; }

}  // namespace gpu_double
