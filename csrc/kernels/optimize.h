// How optimizers change weights: element by element, so a part of an array needs nothing of the rest. Without keys.
//
// Each weight, gradient and remembered value is read once and written at most once. The same bits on every CPU: every
// operation is rounded by itself, in the dtype of the weight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace ringtrain {

class UpdateRule {
 public:
  // `form` says whose formula: "torch", which ringtrain.optim has too, or "mxnet". `numbers`: the hyperparameters by
  // their names there, but for the learning rate and the weight decay; those that are not given have the defaults that
  // they have there. Truth is 1. Throws invalid for a rule or a number that there is not.
  UpdateRule(const std::string& name, const std::string& form, const std::map<std::string, double>& numbers);

  // The states of each weight: arrays like the weight, all zero before the first update.
  const std::vector<std::string>& state_names() const { return state_names_; }

  // Whether there is no formula: "program" of the form "server", whose new weights come from elsewhere. With
  // "keeps_gradient" it remembers that, until then.
  bool is_program() const;

  struct Arrays {
    DType dtype;  // of all of them: float32 or float64
    const void* weight;
    const void* grad;
    std::vector<const void*> states;  // in the order of state_names()
    size_t count;                     // elements of each
    void* new_weight;                 // where the results go: to other memory, or to that of the weight and the states
    std::vector<void*> new_states;
  };
  struct Step {
    int64_t num_update;  // of this weight, from 1
    double lr, wd;
  };
  // The arrays do not overlap, and each is aligned for its dtype. Throws invalid for another dtype, another number of
  // states, or a program.
  void update(const Arrays& arrays, const Step& step) const;

  struct Kind;  // which formula

 private:
  const Kind& kind_;
  std::map<std::string, double> numbers_;
  std::vector<std::string> state_names_;
};

}  // namespace ringtrain
