// Every knob of ringtrain, once: name, default, range, meaning. ringtrain/options/table.py makes the environment
// variables, the keywords of init(), the flags of ringrun and docs/options.md from this table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace ringtrain {

struct OptionInfo {
  std::string name;                  // "fusion_threshold_mb"; the variable is RINGTRAIN_FUSION_THRESHOLD_MB
  std::string alias;                 // Horovod's or MXNet's variable for the same knob, or ""
  double alias_factor;               // multiplies the alias' number (Horovod counts bytes where we count megabytes)
  std::string type;                  // "number", "choice", "steps", "rates" or "text"
  double default_number = 0;         // numbers only
  double minimum = 0, maximum = 0;   // numbers only
  std::vector<std::string> choices;  // of choices, and the words of rates; the first is the default
  std::string meaning;
};

struct Options {
  // clang-format off
  double      fusion_threshold_mb    = 128;
  int64_t     cache_capacity         = 1024;
  double      stall_warning_time_s   = 60;
  double      stall_shutdown_time_s  = 600;
  double      start_timeout_s        = 300;
  double      mailbox_kb             = 128;
  double      ring_chunk_kb          = 60;
  double      ring_from_kb           = 0;
  double      link_hop_us            = 50;
  double      link_gbit              = 10;
  std::string network                = "auto";
  std::string socket_interfaces      = "";
  std::string socket_streams         = "auto";
  double      peer_timeout_s         = 10;
  std::string socket_encryption      = "off";
  std::string on_state_lost          = "restart";
  std::string shared_memory          = "auto";
  std::string allreduce_algorithm    = "auto";
  std::string cross_algorithm        = "auto";
  std::string link_rates             = "off";
  std::string wire_format            = "none";
  std::string reduction_order        = "auto";
  std::string gpu_algorithm          = "auto";
  std::string gpu_cross_algorithm    = "nccl";
  int64_t     gpus_per_rank          = 1;
  std::string simd                   = "auto";
  std::string autotune               = "off";
  std::string autotune_file          = "";
  std::string timeline_filename      = "";
  std::string timeline_mark_cycles   = "off";
  std::string timeline_steps         = "";
  double      timeline_limit_mb      = 256;
  std::string flight_dir             = "";
  std::string preemption_notice      = "";
  std::string log_level              = "info";
  int64_t     metrics_port           = 0;
  std::string metrics_address        = "";
  std::string status                 = "on";
  int64_t     kv_servers             = 0;
  int64_t     kv_threads             = 0;
  int64_t     kv_bound               = 65536;
  double      kv_outbox_mb           = 64;
  double      kv_heartbeat_s         = 5;
  double      kv_timeout_s           = 30;
  double      kv_rejoin_s            = 0;
  int64_t     kv_verbose             = 0;
  std::string kv_interface           = "";
  std::string kv_snapshot_dir        = "";
  double      kv_snapshot_s          = 0;
  std::string kv_python_updaters     = "off";
  // clang-format on

  std::set<std::string> set_by_user;  // names; autotune leaves these alone

  static const std::vector<OptionInfo>& table();

  // Throws Error(invalid), naming the option, its range and the value, when `text` does not fit.
  void set(const std::string& name, const std::string& text);
};

// The numbers of link_rates, in kbit/s; nothing for "off" and "auto".
std::vector<uint64_t> link_rates_of(const std::string& text);

// The options that may change while the job runs, when all ranks agree; none of them may change the bits of a result.
struct Tuning {
  size_t fusion_threshold_bytes = 0;
  size_t mailbox_bytes = 0;     // of one shared-memory mailbox that are used
  size_t ring_chunk_bytes = 0;  // of one message of the ring
  size_t ring_from_bytes = 0;   // from here on reductions between nodes take the ring; 0: where it is the fastest

  bool operator==(const Tuning& other) const {
    return fusion_threshold_bytes == other.fusion_threshold_bytes && mailbox_bytes == other.mailbox_bytes &&
           ring_chunk_bytes == other.ring_chunk_bytes && ring_from_bytes == other.ring_from_bytes;
  }
};
Tuning tuning_of(const Options& options);

}  // namespace ringtrain
