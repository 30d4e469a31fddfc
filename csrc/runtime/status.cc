#include "runtime/status.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/json.h"
#include "base/signals.h"
#include "base/wait.h"
#include "record/step_log.h"
#include "runtime/engine.h"

namespace ringtrain {
namespace {

// An object of JSON.
class Fields {
 public:
  Fields& add_json(const std::string& name, const std::string& json) {
    text_ += (text_.empty() ? "{" : ",") + quoted(name) + ":" + json;
    return *this;
  }
  Fields& add(const std::string& name, const std::string& text) { return add_json(name, quoted(text)); }
  Fields& add(const std::string& name, const char* text) { return add_json(name, quoted(text)); }
  Fields& add(const std::string& name, bool is_so) { return add_json(name, is_so ? "true" : "false"); }
  template <typename Number>
  Fields& add(const std::string& name, Number number) {
    return add_json(name, std::to_string(number));
  }
  std::string text() const { return text_.empty() ? "{}" : text_ + "}"; }

 private:
  std::string text_;
};

template <typename Values, typename ToJson>
std::string list_of(const Values& values, ToJson to_json) {
  std::string text;
  for (const auto& value : values) text += (text.empty() ? "" : ",") + to_json(value);
  return "[" + text + "]";
}

template <typename Number>
std::string list_of_numbers(const std::vector<Number>& numbers) {
  return list_of(numbers, [](Number number) { return std::to_string(number); });
}

// The fields of /proc/PID/stat from the state on; none where there is no such process.
std::vector<std::string> fields_of_process(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::istringstream behind_name(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  return {std::istream_iterator<std::string>(behind_name), std::istream_iterator<std::string>()};
}

// The cores that this process may use, such as "0-3,8".
std::string cores_text() {
  const std::string name = "Cpus_allowed_list:\t";
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.rfind(name, 0) == 0) return line.substr(name.size());
  return "";
}

std::string process_text() {
  constexpr size_t kState = 0, kUserTicks = 11, kSystemTicks = 12, kResidentPages = 21;
  Fields fields;
  fields.add("pid", getpid());
  const std::vector<std::string> own = fields_of_process("self");
  if (own.size() <= kResidentPages) return fields.text();
  const double ticks = std::stod(own[kUserTicks]) + std::stod(own[kSystemTicks]);
  return fields.add("state", own[kState])
      .add("cpu_s", ticks / static_cast<double>(sysconf(_SC_CLK_TCK)))
      .add("resident_bytes", std::stoll(own[kResidentPages]) * sysconf(_SC_PAGESIZE))
      .add("cores", cores_text())
      .text();
}

std::string steps_text(double now) {
  const Steps steps = steps_until_now();
  Fields fields;
  fields.add("count", steps.count).add("per_s", steps.per_s);
  if (steps.begun_s > 0) fields.add("last_began_s_ago", now - steps.begun_s);
  return fields.text();
}

// Bytes over all interfaces of this host but the loopback.
std::string traffic_text() {
  constexpr int kFieldsBetween = 7;
  std::ifstream file("/proc/self/net/dev");
  uint64_t received = 0, sent = 0;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::istringstream name(line.substr(0, colon)), numbers(line.substr(colon + 1));
    std::string interface;
    name >> interface;
    uint64_t of_received = 0, other = 0, of_sent = 0;
    numbers >> of_received;
    for (int i = 0; i < kFieldsBetween; ++i) numbers >> other;
    numbers >> of_sent;
    if (interface == "lo") continue;
    received += of_received;
    sent += of_sent;
  }
  return Fields().add("received_bytes", received).add("sent_bytes", sent).text();
}

std::string operation_text(const Submission& submission, const Progress& progress, double now) {
  const Operation& operation = submission.operation();
  const auto& site = submission.request->site;
  Fields fields;
  fields.add("kind", std::string(kind_of(*submission.request)))
      .add("name", operation.name)
      .add("title", title_of(*submission.request))
      .add("at", site ? *site : "")
      .add("process_set", operation.process_set)
      .add("bytes", operation.bytes())
      .add("submitted_s_ago", now - progress.submitted_s);
  if (operation.kind == OpKind::transfer) {
    const std::vector<int64_t>& way = operation.numbers;
    fields.add_json("between", list_of_numbers(std::vector<int64_t>(way.begin(), way.begin() + 2)));
  }
  if (progress.agreed_s > 0) fields.add("agreed_s_ago", now - progress.agreed_s);
  if (progress.ended_s > 0) fields.add("ended_s_ago", now - progress.ended_s);
  if (progress.error != ErrorKind::none) fields.add("error", name_of(progress.error));
  return fields.text();
}

std::string totals_text(Engine& engine) {
  Totals sum;
  for (const auto& [kind, one] : engine.totals()) {
    sum.operations += one.operations;
    sum.failed += one.failed;
    sum.bytes += one.bytes;
    sum.queued_s += one.queued_s;
    sum.waiting_s += one.waiting_s;
    sum.ready_s += one.ready_s;
    sum.working_s += one.working_s;
  }
  const Coordinator::Counts counts = engine.counts();
  return Fields()
      .add("operations", sum.operations)
      .add("failed", sum.failed)
      .add("bytes", sum.bytes)
      .add("queued_s", sum.queued_s)
      .add("waiting_s", sum.waiting_s)
      .add("ready_s", sum.ready_s)
      .add("working_s", sum.working_s)
      .add("exposed_s", engine.exposed_s())
      .add("rounds", counts.rounds)
      .add("came_last", counts.came_last)
      .text();
}

void add_engine(Fields& fields, Engine& engine, double now) {
  constexpr size_t kMostPending = 32;
  std::string last = "null";
  std::vector<std::string> pending;
  size_t pending_count = 0;
  for (const auto& [submission, progress] : engine.present_operations()) {
    if (progress.ended_s > 0)
      last = operation_text(*submission, progress, now);
    else if (++pending_count <= kMostPending)
      pending.push_back(operation_text(*submission, progress, now));
  }
  Fields sets;
  for (const auto& [id, ranks] : engine.process_sets()) sets.add_json(std::to_string(id), list_of_numbers(ranks));
  fields.add_json("last_operation", last)
      .add_json("pending", list_of(pending, [](const std::string& text) { return text; }))
      .add("pending_count", pending_count)
      .add_json("process_sets", sets.text())
      .add_json("totals", totals_text(engine))
      .add("has_failed", engine.has_failed());
}

// Mounts of /proc/self/mounts that this process may write to, and that have no room.
std::vector<std::string> full_disks() {
  constexpr uint64_t kLittle = 1 << 20;
  std::vector<std::string> full;
  std::ifstream file("/proc/self/mounts");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string device, folder, kind, flags;
    words >> device >> folder >> kind >> flags;
    struct statvfs disk;
    if (flags.rfind("rw", 0) != 0 || statvfs(folder.c_str(), &disk) != 0 || disk.f_blocks == 0) continue;
    if (static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize < kLittle) full.push_back(folder);
  }
  return full;
}

}  // namespace

std::string status_text(int rank, double since_s) {
  const double now = now_s();
  Fields fields;
  fields.add("rank", rank)
      .add("monotonic_s", now)
      .add("age_s", now - since_s)
      .add_json("process", process_text())
      .add_json("steps", steps_text(now))
      .add_json("traffic", traffic_text());
  if (const std::shared_ptr<Engine> engine = current_engine()) add_engine(fields, *engine, now);
  return fields.text();
}

std::string states_text(const std::map<int, int>& pids) {
  Fields fields;
  for (const auto& [rank, pid] : pids) {
    const std::vector<std::string> of_process = fields_of_process(std::to_string(pid));
    fields.add(std::to_string(rank), of_process.empty() ? "" : of_process.front());
  }
  return fields.text();
}

std::string full_disks_text() {
  constexpr double kPatience_s = 0.2;
  struct Found {
    std::atomic<bool> is_complete{false};
    std::vector<std::string> full;
  };
  const auto found = std::make_shared<Found>();
  start_thread([found] {
    found->full = full_disks();
    found->is_complete = true;
  }).detach();
  if (!Waiter::comes_true([&] { return found->is_complete.load(); }, kPatience_s)) return "[]";
  return list_of(found->full, [](const std::string& folder) { return quoted(folder); });
}

}  // namespace ringtrain
