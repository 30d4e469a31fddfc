// How many fields a plain struct has, so that a list of them can be checked to be complete.
#pragma once

#include <cstddef>
#include <type_traits>

namespace ringtrain {
namespace detail {

struct Anything {
  template <typename Value>
  operator Value() const;  // never called
};

template <typename Struct, typename... Values>
auto takes(int) -> decltype(Struct{Values()...}, std::true_type());
template <typename Struct, typename... Values>
std::false_type takes(...);

}  // namespace detail

// Of a struct without constructors and bases: how many values its braces take.
template <typename Struct, typename... Values>
constexpr size_t count_of_fields() {
  if constexpr (decltype(detail::takes<Struct, Values..., detail::Anything>(0))::value)
    return count_of_fields<Struct, Values..., detail::Anything>();
  else
    return sizeof...(Values);
}

}  // namespace ringtrain
