// Enumerations and the option table.
#include "base/log.h"
#include "base/options.h"
#include "coordination/operation.h"
#include "kernels/reduce.h"
#include "network/interfaces.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

nb::list option_table() {
  nb::list table;
  for (const OptionInfo& info : Options::table()) {
    nb::dict row;
    row["name"] = info.name;
    row["alias"] = info.alias;
    row["alias_factor"] = info.alias_factor;
    row["type"] = info.type;
    if (info.type == "number")
      row["default"] = info.default_number;
    else
      row["default"] = info.choices.empty() ? "" : info.choices.front();
    row["minimum"] = info.minimum;
    row["maximum"] = info.maximum;
    row["choices"] = info.choices;
    row["meaning"] = info.meaning;
    table.append(row);
  }
  return table;
}

}  // namespace

void bind_words(nb::module_& module) {
  nb::dict dtypes;
  for (int i = 0; i < kDTypes; ++i) dtypes[name_of(static_cast<DType>(i))] = i;
  module.attr("DTYPES") = dtypes;

  nb::enum_<OpKind>(module, "OpKind", "What an operation does.")
      .value("ALLREDUCE", OpKind::allreduce)
      .value("ALLGATHER", OpKind::allgather)
      .value("BROADCAST", OpKind::broadcast)
      .value("ALLTOALL", OpKind::alltoall)
      .value("REDUCESCATTER", OpKind::reducescatter)
      .value("BARRIER", OpKind::barrier)
      .value("JOIN", OpKind::join)
      .value("ADD_PROCESS_SET", OpKind::add_process_set)
      .value("REMOVE_PROCESS_SET", OpKind::remove_process_set);

  nb::enum_<ReduceOp>(module, "ReduceOp", "How the values of all ranks become one.")
      .value("Average", ReduceOp::average)
      .value("Sum", ReduceOp::sum)
      .value("Min", ReduceOp::min)
      .value("Max", ReduceOp::max)
      .value("Product", ReduceOp::product)
      .value("Adasum", ReduceOp::adasum);

  module.def("option_table", &option_table);
  module.def("set_log_level", &set_log_level);
  module.def("check_option", [](const std::string& name, const std::string& text) { Options().set(name, text); });
  module.def("simd_in_use", &simd_in_use);
  module.def("interface_addresses", &interface_addresses, "(interface, address) of this host's that are up.");
}

}  // namespace ringtrain
