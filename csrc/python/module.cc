// ringtrain._core: the C++ core as a Python module.
#include "python/bind.h"

NB_MODULE(_core, module) {
  // Other libraries may keep modules alive when the interpreter ends, and these what they hold.
  nanobind::set_leak_warnings(false);
  ringtrain::bind_errors(module);
  ringtrain::bind_words(module);
  ringtrain::bind_exit(module);
  ringtrain::bind_handle(module);
  ringtrain::bind_buffer(module);
  ringtrain::bind_engine(module);
  ringtrain::bind_in_place(module);
  ringtrain::bind_observation(module);
  ringtrain::bind_gpu(module);
  ringtrain::bind_kernels(module);
  ringtrain::bind_store_server(module);
  ringtrain::bind_store_client(module);
  ringtrain::bind_mxnet(module);
  ringtrain::bind_xla(module);
  ringtrain::bind_bench(module);
}
