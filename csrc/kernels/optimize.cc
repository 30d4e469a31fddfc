// The formulas of "torch" round as ringtrain/optim.py does, those of "mxnet" as MXNet's kernels on CPUs do: what is a
// Python number there is a double until it meets an array. A multiplication by 1, and a clip at infinity, change
// nothing.
#include "kernels/optimize.h"

#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "kernels/variant.h"

namespace ringtrain {
namespace {

using Names = std::vector<std::string>;

class Numbers {
 public:
  explicit Numbers(const std::map<std::string, double>& values) : values_(values) {}
  double operator[](const char* name) const { return values_.at(name); }
  bool is(const char* name) const { return values_.at(name) != 0; }
  // MXNet takes 0 for "do not clip".
  double limit(const char* name) const { return is(name) ? values_.at(name) : std::numeric_limits<double>::infinity(); }

 private:
  const std::map<std::string, double>& values_;
};

using Arrays = UpdateRule::Arrays;
using Step = UpdateRule::Step;

// By copies that no store can reach, of the formula and of an element, so that the compiler takes several at once.
template <class T, class Formula, size_t... K>
void run(const Arrays& arrays, const Formula formula, std::index_sequence<K...>) {
  const T* const weights = static_cast<const T*>(arrays.weight);
  T* const new_weights = static_cast<T*>(arrays.new_weight);
  const T* const grads = static_cast<const T*>(arrays.grad);
  const T* const states[] = {static_cast<const T*>(arrays.states[K])..., nullptr};
  T* const new_states[] = {static_cast<T*>(arrays.new_states[K])..., nullptr};
  const size_t count = arrays.count;
  RINGTRAIN_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    T weight = weights[i], remembered[] = {states[K][i]..., 0};
    formula(weight, grads[i], remembered[K]...);
    ((new_states[K][i] = remembered[K]), ...);
    new_weights[i] = weight;
  }
}

// formula(weight, gradient, state...) for each element.
template <size_t kStates, class T, class Formula>
void for_each(const Arrays& arrays, const Formula& formula) {
  run<T>(arrays, formula, std::make_index_sequence<kStates>());
}

template <class T>
struct Clip {
  explicit Clip(double limit) : limit_(static_cast<T>(limit)) {}
  T operator()(T value) const { return value < -limit_ ? -limit_ : value > limit_ ? limit_ : value; }

 private:
  const T limit_;
};

template <class T>
T sign_of(T value) {
  return static_cast<T>(value > 0) - static_cast<T>(value < 0);
}

template <class T>
struct TorchSgd {
  static void update(const Numbers& numbers, const Step& step, const Arrays& arrays) {
    const T lr = step.lr, decay = step.wd, momentum = numbers["momentum"];
    const T share = 1 - (step.num_update > 1 ? numbers["dampening"] : 0.0);
    const bool decays = step.wd != 0, looks_ahead = numbers.is("nesterov");
    const auto decayed = [=](T weight, T grad) { return decays ? grad + decay * weight : grad; };
    if (!numbers.is("momentum"))
      return for_each<0, T>(arrays, [=](T& weight, T grad) { weight -= lr * decayed(weight, grad); });
    for_each<1, T>(arrays, [=](T& weight, T plain, T& direction) {
      const T grad = decayed(weight, plain);
      direction = direction * momentum + share * grad;
      weight -= lr * (looks_ahead ? grad + momentum * direction : direction);
    });
  }
};

template <class T, bool kShrinksWeights>
void update_by_adam(const Numbers& numbers, const Step& step, const Arrays& arrays) {
  const double updates = static_cast<double>(step.num_update);
  const T kept = numbers["beta1"], share = 1 - numbers["beta1"];
  const T kept_square = numbers["beta2"], share_square = 1 - numbers["beta2"];
  const T rate = step.lr / (1 - std::pow(numbers["beta1"], updates));
  const T bias = std::pow(1 - std::pow(numbers["beta2"], updates), 0.5);
  const T eps = numbers["eps"], decay = step.wd, shrink = 1 - step.lr * step.wd;
  const bool decays = step.wd != 0;
  const auto move_means = [=](T& weight, T plain, T& mean, T& mean_square) {
    if (kShrinksWeights) weight *= shrink;
    const T grad = !kShrinksWeights && decays ? plain + decay * weight : plain;
    mean = mean * kept + share * grad;
    mean_square = mean_square * kept_square + share_square * (grad * grad);
  };
  const auto move_weight = [=](T& weight, T mean, T mean_square) {
    weight -= rate * mean / (std::sqrt(mean_square) / bias + eps);
  };
  if (!numbers.is("amsgrad"))
    return for_each<2, T>(arrays, [=](T& weight, T grad, T& mean, T& mean_square) {
      move_means(weight, grad, mean, mean_square);
      move_weight(weight, mean, mean_square);
    });
  for_each<3, T>(arrays, [=](T& weight, T grad, T& mean, T& mean_square, T& largest) {
    move_means(weight, grad, mean, mean_square);
    const bool stays = largest > mean_square || largest != largest;  // a NaN stays
    largest = stays ? largest : mean_square;
    move_weight(weight, mean, largest);
  });
}

template <class T>
struct TorchAdam {
  static constexpr auto update = &update_by_adam<T, false>;
};
template <class T>
struct TorchAdamW {
  static constexpr auto update = &update_by_adam<T, true>;
};

// Most formulas of MXNet begin with this: the gradient rescaled and clipped.
template <class T>
struct Rescaled {
  explicit Rescaled(const Numbers& numbers)
      : factor_(static_cast<T>(numbers["rescale_grad"])), clip_(numbers.limit("clip_gradient")) {}
  T operator()(T grad) const { return clip_(factor_ * grad); }
  T operator()(T grad, T added) const { return clip_(factor_ * grad + added); }

 private:
  const T factor_;
  const Clip<T> clip_;
};

// A share of it, which MXNet rounds in another order where nothing is clipped.
template <class T>
struct Scaled {
  Scaled(const Numbers& numbers, double share)
      : share_(static_cast<T>(share)),
        share_of_plain_(share_ * static_cast<T>(numbers["rescale_grad"])),
        rescaled_(numbers),
        clips_(numbers.is("clip_gradient")) {}
  T operator()(T grad) const { return clips_ ? share_ * rescaled_(grad) : share_of_plain_ * grad; }

 private:
  const T share_, share_of_plain_;
  const Rescaled<T> rescaled_;
  const bool clips_;
};

template <class T>
struct MxnetSgd {
  static void update(const Numbers& numbers, const Step& step, const Arrays& arrays) {
    const T decay = static_cast<T>(step.lr) * static_cast<T>(step.wd), kept = numbers["momentum"];
    const Scaled<T> scaled(numbers, step.lr);
    if (!numbers.is("momentum"))
      return for_each<0, T>(arrays, [=](T& weight, T grad) { weight += -(decay * weight) - scaled(grad); });
    for_each<1, T>(arrays, [=](T& weight, T grad, T& momentum) {
      momentum = kept * momentum - decay * weight - scaled(grad);
      weight += momentum;
    });
  }
};

template <class T>
struct MxnetNag {
  static void update(const Numbers& numbers, const Step& step, const Arrays& arrays) {
    const T lr = step.lr, wd = step.wd, kept = numbers["momentum"], shrink = 1 - lr * wd;
    const Rescaled<T> rescaled(numbers);
    const Scaled<T> scaled(numbers, step.lr);
    if (!numbers.is("momentum"))
      return for_each<0, T>(arrays, [=](T& weight, T grad) { weight = shrink * weight - scaled(grad); });
    for_each<1, T>(arrays, [=](T& weight, T plain, T& momentum) {
      const T grad = rescaled(plain), before = kept * momentum;
      weight = weight - before + (kept + 1) * (before - lr * (grad + wd * weight));
      momentum = before - lr * (grad + wd * weight);  // of the new weight, as MXNet's kernel in place
    });
  }
};

// In MXNet the bias of both means goes into the rate.
double unbiased(double lr, const Numbers& numbers, int64_t num_update) {
  const double updates = static_cast<double>(num_update);
  return lr * (std::sqrt(1 - std::pow(numbers["beta2"], updates)) / (1 - std::pow(numbers["beta1"], updates)));
}

// MXNet's kernels differ in how they round it.
template <class T>
T share_times_grad_first(T share, T grad) {
  return share * grad * grad;
}
template <class T>
T square_first(T share, T grad) {
  return share * (grad * grad);
}

template <class T>
struct Means {
  explicit Means(const Numbers& numbers)
      : kept_(static_cast<T>(numbers["beta1"])), kept_square_(static_cast<T>(numbers["beta2"])) {}
  // `share_of`: the share of the new square, in the order in which the kernel multiplies.
  template <class Share>
  void move(T grad, T& mean, T& mean_square, Share share_of) const {
    mean = kept_ * mean + (1 - kept_) * grad;
    mean_square = kept_square_ * mean_square + share_of(1 - kept_square_, grad);
  }

 private:
  const T kept_, kept_square_;
};

template <class T>
struct MxnetAdam {
  static void update(const Numbers& numbers, const Step& step, const Arrays& arrays) {
    const T rate = unbiased(step.lr, numbers, step.num_update), wd = step.wd, epsilon = numbers["epsilon"];
    const Rescaled<T> rescaled(numbers);
    const Means<T> means(numbers);
    for_each<2, T>(arrays, [=](T& weight, T grad, T& mean, T& mean_square) {
      means.move(rescaled(grad, wd * weight), mean, mean_square, share_times_grad_first<T>);
      weight -= rate * mean / (std::sqrt(mean_square) + epsilon);
    });
  }
};

template <class T>
struct MxnetAdamW {
  static void update(const Numbers& numbers, const Step& step, const Arrays& arrays) {
    const T rate = numbers.is("correct_bias") ? unbiased(step.lr, numbers, step.num_update) : step.lr;
    const T wd = step.wd, epsilon = numbers["epsilon"];
    const Rescaled<T> rescaled(numbers);
    const Means<T> means(numbers);
    for_each<2, T>(arrays, [=](T& weight, T grad, T& mean, T& mean_square) {
      means.move(rescaled(grad), mean, mean_square, square_first<T>);
      weight -= rate * (mean / (std::sqrt(mean_square) + epsilon) + wd * weight);
    });
  }
};

template <class T>
struct MxnetRmsProp {
  static void update(const Numbers& numbers, const Step& step, const Arrays& arrays) {
    const T lr = step.lr, wd = step.wd, kept = numbers["gamma1"], momentum = numbers["gamma2"];
    const T epsilon = numbers["epsilon"];
    const Rescaled<T> rescaled(numbers);
    const Clip<T> clip(numbers.limit("clip_weights"));
    if (!numbers.is("centered"))
      return for_each<1, T>(arrays, [=](T& weight, T plain, T& mean_square) {
        const T grad = rescaled(plain, wd * weight);
        mean_square = kept * mean_square + square_first<T>(1 - kept, grad);
        weight = clip(weight - lr * (grad / std::sqrt(mean_square + epsilon)));
      });
    for_each<3, T>(arrays, [=](T& weight, T plain, T& mean_square, T& mean, T& direction) {
      const T grad = rescaled(plain, wd * weight);
      mean_square = kept * mean_square + share_times_grad_first<T>(1 - kept, grad);
      mean = kept * mean + (1 - kept) * grad;
      direction = momentum * direction - lr * grad / std::sqrt(mean_square - mean * mean + epsilon);
      weight = clip(weight + direction);
    });
  }
};

template <class T>
struct MxnetAdaGrad {
  static void update(const Numbers& numbers, const Step& step, const Arrays& arrays) {
    const T lr = step.lr, wd = step.wd, eps = numbers["eps"];
    const Rescaled<T> rescaled(numbers);
    for_each<1, T>(arrays, [=](T& weight, T plain, T& square_sum) {
      const T grad = rescaled(plain);
      square_sum += grad * grad;
      weight += (grad / std::sqrt(square_sum + eps) + weight * wd) * -lr;
    });
  }
};

template <class T>
struct MxnetSignum {
  static void update(const Numbers& numbers, const Step& step, const Arrays& arrays) {
    const T lr = step.lr, wd = step.wd, momentum = numbers["momentum"], wd_lh = numbers["wd_lh"];
    const T kept = 1 - lr * (numbers.is("momentum") ? wd_lh : wd), decay = (1 - momentum) * wd;
    const Scaled<T> scaled(numbers, 1 - momentum);
    if (!numbers.is("momentum"))
      return for_each<0, T>(arrays, [=](T& weight, T grad) { weight = kept * weight - lr * sign_of(grad); });
    for_each<1, T>(arrays, [=](T& weight, T grad, T& direction) {
      direction = momentum * direction - decay * weight - scaled(grad);
      weight = kept * weight + lr * sign_of(direction);
    });
  }
};

template <class T>
struct MxnetTest {
  static void update(const Numbers& numbers, const Step&, const Arrays& arrays) {
    const T factor = numbers["rescale_grad"];
    for_each<0, T>(arrays, [=](T& weight, T grad) { weight += grad * factor; });
  }
};

Names momentum_or_none(const char* name, const Numbers& numbers) {
  return numbers.is("momentum") ? Names{name} : Names{};
}

}  // namespace

struct UpdateRule::Kind {
  using Update = void (*)(const Numbers&, const Step&, const Arrays&);

  const char *name, *form;
  std::map<std::string, double> defaults;
  Names (*remembers)(const Numbers&);
  Update update_float32, update_float64;
};

namespace {

using Defaults = std::map<std::string, double>;

template <template <class> class Formula>
UpdateRule::Kind kind(const char* name, const char* form, const Defaults& defaults,
                      Names (*remembers)(const Numbers&)) {
  return {name, form, defaults, remembers, Formula<float>::update, Formula<double>::update};
}

template <template <class> class Formula>
UpdateRule::Kind kind_of_mxnet(const char* name, Defaults defaults, Names (*remembers)(const Numbers&)) {
  defaults.insert({{"rescale_grad", 1}, {"clip_gradient", 0}});
  return kind<Formula>(name, "mxnet", defaults, remembers);
}

const std::vector<UpdateRule::Kind>& kinds() {
  const auto direction = [](const Numbers& numbers) { return momentum_or_none("direction", numbers); };
  const auto momentum = [](const Numbers& numbers) { return momentum_or_none("momentum", numbers); };
  const auto means = [](const Numbers&) { return Names{"mean", "mean_square"}; };
  const auto torch_means = [](const Numbers& numbers) {
    return numbers.is("amsgrad") ? Names{"mean", "mean_square", "largest_mean_square"} : Names{"mean", "mean_square"};
  };
  const auto of_rmsprop = [](const Numbers& numbers) {
    return numbers.is("centered") ? Names{"mean_square", "mean", "direction"} : Names{"mean_square"};
  };
  const auto square_sum = [](const Numbers&) { return Names{"square_sum"}; };
  const auto nothing = [](const Numbers&) { return Names{}; };
  const auto gradient = [](const Numbers& numbers) {
    return numbers.is("keeps_gradient") ? Names{"gradient"} : Names{};
  };
  const Defaults adam = {{"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}, {"amsgrad", 0}};
  // Never destroyed: threads of servers update values until the process has ended.
  static const auto& all = *new std::vector<UpdateRule::Kind>{
      kind<TorchSgd>("sgd", "torch", {{"momentum", 0}, {"dampening", 0}, {"nesterov", 0}}, direction),
      kind<TorchAdam>("adam", "torch", adam, torch_means),
      kind<TorchAdamW>("adamw", "torch", adam, torch_means),
      kind_of_mxnet<MxnetSgd>("sgd", {{"momentum", 0}}, momentum),
      kind_of_mxnet<MxnetNag>("nag", {{"momentum", 0}}, momentum),
      kind_of_mxnet<MxnetAdam>("adam", {{"beta1", 0.9}, {"beta2", 0.999}, {"epsilon", 1e-8}}, means),
      kind_of_mxnet<MxnetAdamW>("adamw", {{"beta1", 0.9}, {"beta2", 0.999}, {"epsilon", 1e-6}, {"correct_bias", 1}},
                                means),
      kind_of_mxnet<MxnetRmsProp>(
          "rmsprop", {{"gamma1", 0.9}, {"gamma2", 0.9}, {"epsilon", 1e-8}, {"centered", 0}, {"clip_weights", 0}},
          of_rmsprop),
      kind_of_mxnet<MxnetAdaGrad>("adagrad", {{"eps", 1e-7}}, square_sum),
      kind_of_mxnet<MxnetSignum>("signum", {{"momentum", 0.9}, {"wd_lh", 0}}, direction),
      kind_of_mxnet<MxnetTest>("test", {}, nothing),
      {"program", "server", {{"keeps_gradient", 0}}, gradient, nullptr, nullptr},
  };
  return all;
}

std::string joined(const Names& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

const UpdateRule::Kind& find_kind(const std::string& name, const std::string& form) {
  Names there;
  for (const UpdateRule::Kind& kind : kinds()) {
    if (kind.form != form) continue;
    if (kind.name == name) return kind;
    there.push_back(kind.name);
  }
  if (there.empty()) throw invalid("there is no form \"" + form + "\" of optimizers: give \"torch\" or \"mxnet\"");
  throw invalid("there is no optimizer \"" + name + "\" of the form \"" + form + "\"; there are " + joined(there));
}

std::map<std::string, double> with_defaults(const UpdateRule::Kind& kind, const std::map<std::string, double>& given) {
  std::map<std::string, double> numbers = kind.defaults;
  for (const auto& [name, value] : given) {
    const auto known = numbers.find(name);
    if (known != numbers.end()) {
      known->second = value;
      continue;
    }
    Names names;
    for (const auto& [other, unused] : kind.defaults) names.push_back(other);
    throw invalid("the optimizer \"" + std::string(kind.name) + "\" of the form \"" + kind.form +
                  "\" has no number \"" + name + "\"; it has " + joined(names));
  }
  return numbers;
}

}  // namespace

UpdateRule::UpdateRule(const std::string& name, const std::string& form, const std::map<std::string, double>& numbers)
    : kind_(find_kind(name, form)),
      numbers_(with_defaults(kind_, numbers)),
      state_names_(kind_.remembers(Numbers(numbers_))) {}

bool UpdateRule::is_program() const { return !kind_.update_float32; }

void UpdateRule::update(const Arrays& arrays, const Step& step) const {
  if (is_program()) throw invalid("a program updates this, and no formula");
  if (arrays.states.size() != state_names_.size())
    throw invalid("this optimizer remembers " + std::to_string(state_names_.size()) + " arrays, but it was given " +
                  std::to_string(arrays.states.size()));
  if (arrays.dtype != DType::float32 && arrays.dtype != DType::float64)
    throw invalid(std::string("an optimizer computes in float32 or float64, not in ") + name_of(arrays.dtype));
  const auto formula = arrays.dtype == DType::float32 ? kind_.update_float32 : kind_.update_float64;
  formula(Numbers(numbers_), step, arrays);
}

}  // namespace ringtrain
