// Memory of one packed layer: private pages, huge where the kernel has them, absent from forked
// children.
#pragma once
#include <cstdint>

namespace kt {

class Arena {
 public:
  explicit Arena(
      int64_t bytes);  // throws std::runtime_error naming the size when memory is refused
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Throws std::runtime_error in a forked child, which does not have these pages.
  void* data() const;
  int64_t bytes() const { return bytes_; }

 private:
  void* data_;
  int64_t bytes_;
  int owner_;  // process id: a child must neither read the pages nor unmap what now lies there
};

}  // namespace kt
