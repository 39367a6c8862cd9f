// See arena.h.
#include "machine/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "machine/red_zone.h"

namespace kt {

Arena::Arena(int64_t bytes) : bytes_(std::max<int64_t>(bytes, 1)), owner_(getpid()) {
  data_ = mmap(nullptr, size_t(bytes_ + kRedZone), PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data_ == MAP_FAILED)
    throw std::runtime_error(
        "the system refused " + std::to_string(bytes_) +
        " bytes for packed experts; free memory or use a smaller weight format");
  madvise(data_, size_t(bytes_),
          MADV_HUGEPAGE);  // best effort: 8 % more DRAM bandwidth where granted
  madvise(data_, size_t(bytes_), MADV_DONTFORK);  // dataloader workers need no page tables for this
  limit_access(data_, bytes_, bytes_ + kRedZone);
}

Arena::~Arena() {
  limit_access(data_, bytes_ + kRedZone, bytes_ + kRedZone);
  if (getpid() == owner_) munmap(data_, size_t(bytes_ + kRedZone));
}

void* Arena::data() const {
  if (getpid() != owner_)
    throw std::runtime_error(
        "packed experts do not follow a fork; load them in this process, or start it with spawn");
  return data_;
}

}  // namespace kt
