// See recycled_buffer.h.
#include "machine/recycled_buffer.h"

#include <sys/mman.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "kt.h"

namespace kt {
namespace {

struct Spare {
  std::mutex mutex;
  std::map<int64_t, std::vector<void*>> blocks;  // by size in whole pages
  int64_t bytes = 0;
};
// Never destroyed: tensors may go after static objects have.
Spare& spare() {
  static Spare* const s = new Spare;
  return *s;
}

int64_t whole_pages(int64_t bytes) { return round_up(max64(bytes, 1), 4096); }

}  // namespace

RecycledBuffer::RecycledBuffer(int64_t bytes) : data_(nullptr), bytes_(bytes) {
  const int64_t size = whole_pages(bytes);
  Spare& s = spare();
  {
    std::lock_guard hold(s.mutex);
    if (auto found = s.blocks.find(size); found != s.blocks.end() && !found->second.empty()) {
      data_ = found->second.back();
      found->second.pop_back();
      s.bytes -= size;
      return;
    }
  }
  data_ = mmap(nullptr, size_t(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED)
    throw std::runtime_error("the system refused " + std::to_string(bytes) +
                             " bytes for gradients; free memory or use a smaller LoRA rank");
}

RecycledBuffer::~RecycledBuffer() {
  const int64_t size = whole_pages(bytes_);
  Spare& s = spare();
  std::lock_guard hold(s.mutex);
  s.blocks[size].push_back(data_);
  s.bytes += size;
}

int64_t recycled_bytes() {
  Spare& s = spare();
  std::lock_guard hold(s.mutex);
  return s.bytes;
}

void release_recycled() {
  Spare& s = spare();
  std::lock_guard hold(s.mutex);
  for (auto& [size, blocks] : s.blocks)
    for (void* block : blocks) munmap(block, size_t(size));
  s.blocks.clear();
  s.bytes = 0;
}

}  // namespace kt
