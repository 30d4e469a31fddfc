// One call of an exported function: it is logged, may have been told to fail, and answers a code for what is refused.
//
// Any thread. The state of the fakes is never destroyed: threads of streams may outlive main().
#pragma once

#include <exception>
#include <sstream>
#include <string>
#include <utility>

namespace gpu_double {

// Thrown inside of a call, which then answers `code`. The sentence is for ncclGetLastError.
struct Refusal {
  int code;
  std::string sentence;
};

// Refuses an argument with the driver's code for an invalid value.
inline void require(bool is_valid) {
  if (!is_valid) throw Refusal{1, "invalid value"};
}

class Call {
 public:
  // `values` are what the log shows of the arguments.
  template <typename... Values>
  explicit Call(const char* name, const Values&... values) : name_(name) {
    if (!is_logging()) return;
    std::ostringstream line;
    line << name;
    ((line << ' ' << values), ...);
    line << '\n';
    write_line(line.str());
  }

  // 0, or the code of the Refusal that `body` threw.
  template <typename Body>
  int run(Body&& body) const {
    try {
      refuse_where_planned();
      std::forward<Body>(body)();
      return 0;
    } catch (const Refusal& refusal) {
      remember(refusal);
      return refusal.code;
    }
  }

  // The reason of the last refused call of this process.
  static std::string last_sentence();

  // Appends each call, one on a line, to the file <pid> there, from now on. An empty folder ends the log.
  static void log_to(const std::string& folder);
  // Calls are counted anew.
  static void plan_failures(const std::string& plan);

 private:
  static bool is_logging();
  static void write_line(const std::string& line);
  static void remember(const Refusal& refusal);
  void refuse_where_planned() const;

  const char* const name_;
};

}  // namespace gpu_double
