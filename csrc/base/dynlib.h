// A shared library that is found when the program runs.
#pragma once

#include <dlfcn.h>

#include <string>

#include "base/error.h"

namespace ringtrain {

// Never closed: others may use the library, too.
class DynamicLibrary {
 public:
  // The copy that is loaded already, else loads it. Throws failure, in the loader's words.
  explicit DynamicLibrary(const std::string& path)
      : name_(path), handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD)) {
    if (!handle_) handle_ = dlopen(path.c_str(), RTLD_NOW);
    if (!handle_) throw failure("cannot open " + path + ": " + dlerror());
  }
  static bool is_loaded(const std::string& path) { return dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr; }

  // A function of any type.
  struct Symbol {
    void* address;

    template <typename Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };
  // Null where the library does not have it.
  Symbol find_optional(const char* name) const { return {dlsym(handle_, name)}; }
  Symbol find(const char* name) const {
    const Symbol symbol = find_optional(name);
    if (!symbol.address) throw failure(name_ + " has no function " + name);
    return symbol;
  }
  template <typename Function>
  void find_optional(Function*& function, const char* name) const {
    function = find_optional(name);
  }
  template <typename Function>
  void find(Function*& function, const char* name) const {
    function = find(name);
  }

  // The path of the file that has this function of the library.
  template <typename Function>
  static std::string path_of(Function* function) {
    Dl_info info;
    return dladdr(reinterpret_cast<void*>(function), &info) && info.dli_fname ? info.dli_fname : "";
  }

 private:
  std::string name_;
  void* handle_;
};

}  // namespace ringtrain
