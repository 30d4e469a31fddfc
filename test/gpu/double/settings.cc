#include "settings.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace gpu_double {
namespace {

std::string text_of(const std::string& name) {
  const char* value = std::getenv(("RINGTRAIN_GPU_DOUBLE_" + name).c_str());
  return value == nullptr ? "" : value;
}

[[noreturn]] void refuse(const std::string& name, const std::string& value) {
  std::fprintf(stderr, "RINGTRAIN_GPU_DOUBLE_%s=%s makes no sense\n", name.c_str(), value.c_str());
  std::abort();
}

double number_of(const std::string& name, const std::string& value) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0') refuse(name, value);
  return number;
}

double number(const std::string& name, double otherwise) {
  const std::string value = text_of(name);
  return value.empty() ? otherwise : number_of(name, value);
}

std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

std::string rank_of_launcher() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"})
    if (const char* value = std::getenv(name)) return value;
  return "0";
}

Settings read_environment() {
  Settings read;
  read.gpus = static_cast<int>(number("GPUS", 4));
  read.slices = static_cast<int>(number("SLICES", 1));
  read.memory_bytes = static_cast<size_t>(number("MEMORY", 1 << 30));
  read.driver_version = static_cast<int>(number("DRIVER_VERSION", 13000));
  read.nccl_version = static_cast<int>(number("NCCL_VERSION", 22703));
  read.delay_us = static_cast<long>(number("DELAY_US", 0));
  read.is_guarded = number("GUARD", 0) != 0;
  read.join_timeout_s = number("JOIN_TIMEOUT_S", 0);
  read.has_handshakes = number("HANDSHAKE", 0) != 0;
  read.destroy_us = static_cast<long>(number("DESTROY_US", 0));
  read.failures = read_failures(text_of("FAIL"));
  return read;
}

}  // namespace

std::vector<PlannedFailure> read_failures(const std::string& plan) {
  std::vector<PlannedFailure> failures;
  for (const std::string& one : parts_of(plan, ',')) {
    const std::vector<std::string> parts = parts_of(one, ':');
    const bool is_for_one_rank = parts.size() == 4 && parts[3].rfind("rank=", 0) == 0;
    if (parts.size() != 3 && !is_for_one_rank) refuse("FAIL", one);
    if (is_for_one_rank && parts[3].substr(5) != rank_of_launcher()) continue;
    const long nth = parts[1] == "*" ? 0 : static_cast<long>(number_of("FAIL", parts[1]));
    failures.push_back({parts[0], nth, static_cast<int>(number_of("FAIL", parts[2]))});
  }
  return failures;
}

const Settings& settings() {
  static const Settings* const read = new Settings(read_environment());
  return *read;
}

}  // namespace gpu_double
