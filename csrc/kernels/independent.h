// RINGTRAIN_INDEPENDENT before a loop: none of its rounds needs what another one stores.
#pragma once

#if defined(__clang__)
#define RINGTRAIN_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define RINGTRAIN_INDEPENDENT _Pragma("GCC ivdep")
#endif
