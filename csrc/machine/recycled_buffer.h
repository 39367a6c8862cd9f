// Memory that is asked for again and again in the same sizes, such as gradients: what is given back
// keeps its pages for the next request of that size, since the kernel clears every fresh page
// (gradients of rank 64 cost 6 % of a training step so).
#pragma once
#include <cstdint>

namespace kt {

class RecycledBuffer {
 public:
  explicit RecycledBuffer(
      int64_t bytes);  // throws std::runtime_error naming the size when memory is refused
  ~RecycledBuffer();
  RecycledBuffer(const RecycledBuffer&) = delete;
  RecycledBuffer& operator=(const RecycledBuffer&) = delete;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_;
  int64_t bytes_;
};

// Bytes that nobody holds; release_recycled() returns them to the system.
int64_t recycled_bytes();
void release_recycled();

}  // namespace kt
