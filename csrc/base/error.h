// The kinds of errors. Thrown inside the core; the engine loop turns them into values on Handles, and the
// bindings turn those into the Python exceptions of ringtrain/errors.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace ringtrain {

enum class ErrorKind : uint8_t {
  none,
  invalid,          // ValueError: the caller's own mistake, told on the caller's line
  failure,          // RingtrainError: none of the kinds below
  mismatch,         // MismatchError: the ranks disagree about one operation; the engine lives on
  peer_lost,        // PeerLostError: a rank is gone; nothing works any more
  stalled,          // StalledError: waited longer than stall_shutdown_time_s
  deadlock,         // DeadlockError: all ranks wait for each other; the engine lives on
  remote,           // RemoteError: another rank has failed, with an exception of its script; nothing works any more
  shut_down,        // ShutDownError: some rank has left, so no operation can complete any more
  not_initialized,  // NotInitializedError: before init(), after shutdown(), or in a forked child
};

constexpr ErrorKind kLastErrorKind = ErrorKind::not_initialized;

// As Python's users know it; "" for none.
inline const char* name_of(ErrorKind kind) {
  constexpr const char* kNames[] = {"",
                                    "ValueError",
                                    "RingtrainError",
                                    "MismatchError",
                                    "PeerLostError",
                                    "StalledError",
                                    "DeadlockError",
                                    "RemoteError",
                                    "ShutDownError",
                                    "NotInitializedError"};
  return kNames[static_cast<size_t>(kind)];
}

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// Texts that travel between ranks have room for so many bytes; a longer one loses its middle, for a traceback says what
// was called at its beginning and what went wrong at its end.
constexpr size_t kLongestErrorText = 8191;
std::string shortened(const std::string& text);

inline Error invalid(const std::string& message) { return {ErrorKind::invalid, message}; }
inline Error failure(const std::string& message) { return {ErrorKind::failure, message}; }

// Runs work() and returns the error it threw, or nothing.
template <typename Work>
std::optional<Error> error_of(Work work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return failure(error.what());
  }
  return std::nullopt;
}

}  // namespace ringtrain
