#include "base/options.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <sstream>

#include "base/error.h"

namespace ringtrain {
namespace {

struct Entry {
  OptionInfo info;
  std::function<void(Options&, double)> set_number;
  std::function<void(Options&, const std::string&)> set_text;  // of all but numbers
};

template <typename T>
Entry number(T Options::* member, const char* name, double minimum, double maximum, const char* meaning,
             const char* alias = "", double alias_factor = 1) {
  OptionInfo info{name,    alias,   alias_factor, "number", static_cast<double>(Options().*member),
                  minimum, maximum, {},           meaning};
  return {info, [member](Options& options, double value) { options.*member = static_cast<T>(value); }, nullptr};
}

Entry choice(std::string Options::* member, const char* name, std::vector<std::string> choices, const char* meaning,
             const char* alias = "") {
  OptionInfo info{name, alias, 1, "choice", 0, 0, 0, std::move(choices), meaning};
  return {info, nullptr, [member](Options& options, const std::string& value) { options.*member = value; }};
}

Entry text(std::string Options::* member, const char* name, const char* meaning, const char* alias = "") {
  OptionInfo info{name, alias, 1, "text", 0, 0, 0, {}, meaning};
  return {info, nullptr, [member](Options& options, const std::string& value) { options.*member = value; }};
}

Entry steps(std::string Options::* member, const char* name, const char* meaning) {
  Entry entry = text(member, name, meaning);
  entry.info.type = "steps";
  return entry;
}

Entry rates(std::string Options::* member, const char* name, const char* meaning) {
  Entry entry = choice(member, name, {"off", "auto"}, meaning);
  entry.info.type = "rates";
  return entry;
}

const std::vector<Entry>& entries() {
  constexpr double kDay = 86400, kMega = 1024.0 * 1024.0;
  static const std::vector<Entry> all = {
      number(&Options::fusion_threshold_mb, "fusion_threshold_mb", 0, 4096,
             "Small tensors are joined into one operation of at most this many megabytes; 0 joins nothing.",
             "HOROVOD_FUSION_THRESHOLD", 1 / kMega),
      number(
          &Options::cache_capacity, "cache_capacity", 0, 1 << 20,
          "Number of operations that are remembered, so that a repeated one costs one bit to agree on; up to 16 times "
          "as many if these repeat. 0 remembers none.",
          "HOROVOD_CACHE_CAPACITY"),
      number(&Options::stall_warning_time_s, "stall_warning_time_s", 0.1, kDay,
             "Seconds after which an operation that some rank has not submitted is reported.",
             "HOROVOD_STALL_CHECK_TIME_SECONDS"),
      number(&Options::stall_shutdown_time_s, "stall_shutdown_time_s", 0, kDay,
             "Seconds after which waiting ends with StalledError on every rank; 0 waits for ever.",
             "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
      number(&Options::start_timeout_s, "start_timeout_s", 0, kDay,
             "Seconds that init() waits for the other ranks before it ends with StalledError; 0 waits for ever.",
             "HOROVOD_START_TIMEOUT"),
      number(&Options::mailbox_kb, "mailbox_kb", 4, 4096,
             "Size of one shared-memory mailbox between two ranks of a node, in kilobytes."),
      number(&Options::ring_chunk_kb, "ring_chunk_kb", 1, 65536,
             "Largest message of the ring between nodes, in kilobytes; from 64 on most MPIs ask the receiver first "
             "over TCP, and the answer waits behind other data. Over sockets large arrays take longer ones, and all "
             "do, of 1024, where a round trip takes 5 ms or more, unless this is set."),
      number(&Options::ring_from_kb, "ring_from_kb", 0, 1 << 20,
             "Reductions between nodes go round the ring from this many kilobytes on, and by recursive doubling, or "
             "halving, below; 0 takes the fastest of these by the number of ranks, link_hop_us and link_gbit."),
      number(&Options::link_hop_us, "link_hop_us", 0.1, 1e8,
             "Microseconds of a short message between nodes, by which algorithms are chosen. From 1000 on, while more "
             "operations wait, up to eight nodes agree on the next ones while the end of one is under way. Over "
             "sockets init() takes what it has measured, in powers of two, where a round trip takes 5 ms or more, "
             "unless this is set."),
      number(&Options::link_gbit, "link_gbit", 0.001, 1e5,
             "Gbit/s of a link between nodes, by which algorithms are chosen."),
      choice(&Options::network, "network", {"auto", "mpi", "sockets"},
             "Network between nodes: auto takes MPI if its launcher has started the job, otherwise TCP sockets."),
      text(&Options::socket_interfaces, "socket_interfaces",
           "Interfaces such as eth0 where sockets listen and connect, or ranges such as 10.1.0.0/16, with a comma "
           "between several, which are used together; by default the one that leads to rank 0."),
      choice(&Options::socket_streams, "socket_streams",
             {"auto", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16"},
             "TCP connections between two ranks: auto takes one, and four where a round trip takes 20 ms or more."),
      number(&Options::peer_timeout_s, "peer_timeout_s", 0, kDay,
             "Seconds without any answer from a rank's host over sockets after which that rank is lost; until then a "
             "broken connection is made again. 0 waits for ever."),
      choice(&Options::socket_encryption, "socket_encryption", {"off", "on"},
             "Whether the values that ranks and servers send over sockets are encrypted, each connection with keys of "
             "its own, by OpenSSL's libcrypto, which must be there then; network=auto takes sockets."),
      choice(&Options::on_state_lost, "on_state_lost", {"restart", "fail"},
             "Action when an elastic job has lost every rank with its state and no file of save_to has one: "
             "restart begins the training anew, at step 0; fail ends the job with exit code 1."),
      choice(&Options::shared_memory, "shared_memory", {"auto", "off"},
             "Whether the ranks of a node talk through /dev/shm; off sends everything over the network."),
      choice(&Options::allreduce_algorithm, "allreduce_algorithm", {"auto", "ring", "doubling", "mpi", "measured"},
             "Algorithm of reductions: auto chooses by topology and size; ring, doubling and mpi force one way; "
             "measured "
             "tries ours and MPI's at the start and takes the faster."),
      choice(&Options::cross_algorithm, "cross_algorithm", {"auto", "ring", "doubling", "mpi", "measured"},
             "Algorithm between the nodes of a hierarchical allreduce; measured applies to short ones."),
      rates(&Options::link_rates, "link_rates",
            "Mbit/s of each host's link, with a comma between them, in the order of the ranks, such as 1000,1000,100; "
            "auto measures them in init(). Arrays are then cut so that the slowest link carries least in an "
            "allreduce; off cuts them equally."),
      choice(&Options::wire_format, "wire_format", {"none", "fp16", "bf16"},
             "16-bit floats in which sums and averages of float32 travel between nodes, where recursive doubling "
             "is too slow for them; they are added up in float32."),
      choice(&Options::reduction_order, "reduction_order", {"auto", "ranks"},
             "Order in which the values of the ranks are added up: auto takes one that follows from the array, the "
             "ranks and their hosts; ranks adds rank 1 to rank 0, then rank 2 and so on, with the same bits on any "
             "hosts and networks, for which all values of floats go straight to a rank that adds them."),
      choice(
          &Options::gpu_algorithm, "gpu_algorithm", {"auto", "nccl", "hierarchical", "staged"},
          "Algorithm for arrays on GPUs: auto takes NCCL if it connects the ranks and each rank has a GPU of its own, "
          "otherwise host memory, which staged forces; nccl takes NCCL also for ranks that share a GPU, and is an "
          "error if NCCL does not connect the ranks; hierarchical takes NCCL inside a node and "
          "gpu_cross_algorithm between nodes."),
      choice(&Options::gpu_cross_algorithm, "gpu_cross_algorithm", {"nccl", "mpi", "cuda_aware_mpi"},
             "Way between the nodes of gpu_algorithm=hierarchical: NCCL, MPI through host memory, or "
             "an MPI that takes addresses of GPUs itself."),
      number(&Options::gpus_per_rank, "gpus_per_rank", 1, 64,
             "Number of GPUs that each rank has for itself: init() chooses the first of them, by local rank."),
      choice(&Options::simd, "simd", {"auto", "scalar", "avx2", "avx512", "neon"},
             "Instruction set of the reduction kernels; auto takes the best that this CPU has."),
      choice(&Options::autotune, "autotune", {"off", "on"},
             "Whether to look for better values of the thresholds and sizes above, except those that are set, "
             "during the first seconds of communication, and print them.",
             "HOROVOD_AUTOTUNE"),
      text(
          &Options::autotune_file, "autotune_file",
          "File to which rank 0 writes the values that autotune has found. If the file exists, its values are used and "
          "nothing is tuned."),
      text(&Options::timeline_filename, "timeline_filename",
           "File for the timeline of all ranks, for chrome://tracing and Perfetto.", "HOROVOD_TIMELINE"),
      choice(&Options::timeline_mark_cycles, "timeline_mark_cycles", {"off", "on"},
             "Whether to mark the rounds of the negotiation in the timeline.", "HOROVOD_TIMELINE_MARK_CYCLES"),
      steps(&Options::timeline_steps, "timeline_steps",
            "Steps of the optimizers to record in the timeline, both ends included; by default all."),
      number(&Options::timeline_limit_mb, "timeline_limit_mb", 0.01, 1 << 20,
             "Size of each rank's part of the timeline, in megabytes; later events are left out."),
      text(&Options::flight_dir, "flight_dir",
           "Folder to which each rank writes its last 1,024 operations and the stacks of its threads when an operation "
           "stalls, when it loses another rank or gets SIGUSR1; by default one of this job's own in the folder for "
           "temporary files."),
      text(&Options::preemption_notice, "preemption_notice",
           "File that announces, by coming into being, that this host is to be preempted. An executable file is run "
           "every 5 s instead: exit code 0 announces it, and a number that it prints is the seconds left."),
      choice(&Options::log_level, "log_level", {"info", "trace", "debug", "warning", "error", "fatal"},
             "Minimum level of messages on standard error: info includes the result of autotune; trace and debug print "
             "the "
             "same as info."),
      number(&Options::metrics_port, "metrics_port", 0, 65535,
             "Port at which each rank serves its metrics for Prometheus, plus its local rank; 0 serves none."),
      text(&Options::metrics_address, "metrics_address",
           "Address at which the metrics are served, without a secret: by default 127.0.0.1, for this host alone; "
           "0.0.0.0 serves them to all hosts."),
      choice(
          &Options::status, "status", {"on", "off"},
          "Whether each rank listens for `ringrun status`, at a port that the system chooses: on 127.0.0.1, and in a "
          "job on several hosts at its address among them."),
      number(
          &Options::kv_servers, "kv_servers", 0, 1 << 16,
          "Number of ranks that become servers of key-value stores, in which init() never returns; 0 has a server in "
          "each worker."),
      number(&Options::kv_threads, "kv_threads", 0, 64,
             "Threads of a server of key-value stores that talk to workers, and of a worker that talk to servers over "
             "TCP, at most one for each of these; 0 takes two, or one where there are fewer cores."),
      number(&Options::kv_bound, "kv_bound", 1, 1LL << 40,
             "Number of elements from which on a key of a store is split over all servers; a smaller key is on one of "
             "them.",
             "MXNET_KVSTORE_BIGARRAY_BOUND"),
      number(&Options::kv_outbox_mb, "kv_outbox_mb", 1, 1 << 20,
             "Megabytes that a worker sends to a server on another host before a push waits for an answer."),
      number(&Options::kv_heartbeat_s, "kv_heartbeat_s", 0.05, kDay,
             "Seconds between the signs of life of workers and servers of key-value stores, at most a third of "
             "kv_timeout_s.",
             "PS_HEARTBEAT_INTERVAL"),
      number(&Options::kv_timeout_s, "kv_timeout_s", 0.2, kDay,
             "Seconds of silence after which a worker or server of key-value stores is dead.", "PS_HEARTBEAT_TIMEOUT"),
      number(
          &Options::kv_rejoin_s, "kv_rejoin_s", 0, kDay,
          "Seconds for which the others wait for a replacement of a dead worker or server before they get an error."),
      number(&Options::kv_verbose, "kv_verbose", 0, 9,
             "Log of workers and servers of key-value stores on standard error: 1 who listens where, comes, goes and "
             "dies, 2 and more each frame as well.",
             "PS_VERBOSE"),
      text(&Options::kv_interface, "kv_interface",
           "Interfaces or ranges of addresses where servers of key-value stores listen, as socket_interfaces; by "
           "default "
           "the one that leads to the scheduler.",
           "DMLC_INTERFACE"),
      text(&Options::kv_snapshot_dir, "kv_snapshot_dir",
           "Folder of the snapshots of servers of key-value stores, from which a restarted server goes on."),
      choice(
          &Options::kv_python_updaters, "kv_python_updaters", {"off", "on"},
          "Whether servers of key-value stores that are processes of their own run optimizers and updaters in Python, "
          "which workers send as pickles: any process that knows the job's secret can have them run anything."),
      number(&Options::kv_snapshot_s, "kv_snapshot_s", 0, kDay,
             "Seconds between the snapshots in kv_snapshot_dir; 0 writes none."),
  };
  return all;
}

std::string range_of(const OptionInfo& info) {
  if (info.type == "number") {
    auto plain = [](double value) {
      std::string text = std::to_string(value);
      text.erase(text.find_last_not_of('0') + 1);
      if (text.back() == '.') text.pop_back();
      return text;
    };
    return "a number from " + plain(info.minimum) + " to " + plain(info.maximum);
  }
  if (info.type == "steps") return "steps such as 100-110";
  if (info.type == "rates") return "off, auto or the Mbit/s of each host, from 0.001 to 1000000, such as 1000,1000,100";
  std::string text = "one of";
  for (const std::string& name : info.choices) text += " " + name;
  return text;
}

// "100-110", or "100" for one step alone.
bool are_steps(const std::string& text) {
  constexpr size_t kMostDigits = 18;  // what a long long holds
  const auto is_step = [](const std::string& digits) {
    return !digits.empty() && digits.size() <= kMostDigits &&
           digits.find_first_not_of("0123456789") == std::string::npos;
  };
  const size_t hyphen = text.find('-');
  if (hyphen == std::string::npos) return is_step(text);
  const std::string first = text.substr(0, hyphen), last = text.substr(hyphen + 1);
  return is_step(first) && is_step(last) && std::stoll(first) <= std::stoll(last);
}

// In kbit/s; nothing if the text has anything else than rates.
std::vector<uint64_t> rates_in(const std::string& text) {
  constexpr double kKilo = 1000, kLeast = 0.001, kMost = 1e6;
  std::vector<uint64_t> rates;
  std::istringstream words(text + ",");
  for (std::string word; std::getline(words, word, ',');) {
    const bool is_plain = !word.empty() && word.find_first_not_of("0123456789.") == std::string::npos;
    char* end = nullptr;
    const double rate = std::strtod(word.c_str(), &end);
    if (!is_plain || *end != '\0' || !(rate >= kLeast && rate <= kMost)) return {};
    rates.push_back(static_cast<uint64_t>(std::llround(rate * kKilo)));
  }
  return rates;
}

bool is_choice(const OptionInfo& info, const std::string& text) {
  return std::find(info.choices.begin(), info.choices.end(), text) != info.choices.end();
}

bool fits(const OptionInfo& info, const std::string& text) {
  if (info.type == "choice") return is_choice(info, text);
  if (info.type == "steps") return text.empty() || are_steps(text);
  if (info.type == "rates") return !rates_in(text).empty() || is_choice(info, text);
  return true;
}

}  // namespace

std::vector<uint64_t> link_rates_of(const std::string& text) { return rates_in(text); }

const std::vector<OptionInfo>& Options::table() {
  static const std::vector<OptionInfo> infos = [] {
    std::vector<OptionInfo> all;
    for (const Entry& entry : entries()) all.push_back(entry.info);
    return all;
  }();
  return infos;
}

void Options::set(const std::string& name, const std::string& text) {
  for (const Entry& entry : entries()) {
    const OptionInfo& info = entry.info;
    if (info.name != name) continue;
    const Error out_of_range = invalid("option " + name + " must be " + range_of(info) + ", not " + text);
    if (entry.set_text) {
      if (!fits(info, text)) throw out_of_range;
      return entry.set_text(*this, text);
    }
    double value = 0;
    size_t used = 0;
    try {
      value = std::stod(text, &used);
    } catch (const std::exception&) {
      throw out_of_range;
    }
    if (used != text.size() || !(value >= info.minimum && value <= info.maximum)) throw out_of_range;
    return entry.set_number(*this, value);
  }
  throw invalid("there is no option named " + name + "; see docs/options.md");
}

Tuning tuning_of(const Options& options) {
  constexpr double kKilo = 1024, kMega = 1024 * 1024;
  const auto bytes = [](double number, double unit) { return static_cast<size_t>(number * unit); };
  return {bytes(options.fusion_threshold_mb, kMega), bytes(options.mailbox_kb, kKilo),
          bytes(options.ring_chunk_kb, kKilo), bytes(options.ring_from_kb, kKilo)};
}

}  // namespace ringtrain
