// A handler that is registered by another source than base/fork.cc, and destroys there what belongs to the parent.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>

#include "base/fork.h"

namespace {

int exit_code_of_child = 0;

struct Resource {
  ~Resource() { exit_code_of_child = 1; }
};

std::shared_ptr<Resource>& resource = *new std::shared_ptr<Resource>;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { resource.reset(); });

}  // namespace

int main() {
  resource = ringtrain::owned_here(new Resource);
  const pid_t child = fork();
  if (child == 0) _exit(exit_code_of_child);
  int status = 0;
  waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}
