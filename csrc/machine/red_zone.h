// Memory from mmap has no red zones. In a build with AddressSanitizer this gives it one behind its
// end; in all others it is nothing.
#pragma once
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace kt {

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kRedZone = 4096;  // bytes to map beyond those that are used

// Of the `mapped` bytes at p only the first `used` may be touched.
inline void limit_access(void* p, int64_t used, int64_t mapped) {
  ASAN_UNPOISON_MEMORY_REGION(p, size_t(used));
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(p) + used, size_t(mapped - used));
}
#else
constexpr int64_t kRedZone = 0;
inline void limit_access(void*, int64_t, int64_t) {}
#endif

}  // namespace kt
