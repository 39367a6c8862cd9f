// See numa.h. System calls without libnuma, which the wheel would have to bring along.
#include "machine/numa.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>

namespace kt {
namespace {

struct Call {
  const char* name;
  const char* effect;  // of its refusal
  int forced = 0;      // error number of the test aid
  bool told = false;
};

enum CallId { kMbind, kMempolicy, kAffinity };
std::array<Call, 3> calls{{{"mbind", "expert weights lie on any NUMA node"},
                           {"set_mempolicy", "scratch memory lies on any NUMA node"},
                           {"sched_setaffinity", "kernel threads run on any CPU"}}};
std::mutex calls_mutex;
std::vector<std::string> refused;

// Runs a system call unless a test wants it refused; keeps the first refusal of each kind.
template <class F>
void attempt(CallId id, F call) {
  Call& c = calls[id];
  int error = c.forced;
  if (!error) error = call() ? errno : 0;
  if (!error) return;
  std::lock_guard lock(calls_mutex);
  if (c.told) return;
  c.told = true;
  refused.push_back(std::string("the system refused ") + c.name + " (" + std::strerror(error) +
                    "): " + c.effect + ", which is slower; results are the same");
}

// A node mask as the kernel reads it: one bit more than the highest id is announced to it.
struct NodeMask {
  std::vector<unsigned long> words;
  unsigned long bits;
  explicit NodeMask(int id) {
    constexpr int kBits = 8 * sizeof(unsigned long);
    words.resize(size_t(id / kBits + 1));
    words.back() = 1ul << id % kBits;
    bits = words.size() * kBits + 1;
  }
};

// `total` things over holders of these weights, each at least one: every further one goes where it
// leaves the most weight per thing.
std::vector<int64_t> apportion(const std::vector<int64_t>& weights, int64_t total) {
  std::vector<int64_t> out(weights.size(), 1);
  for (int64_t rest = total - int64_t(weights.size()); rest > 0; --rest) {
    size_t best = 0;
    for (size_t i = 1; i < weights.size(); ++i)
      if (weights[i] * (out[best] + 1) > weights[best] * (out[i] + 1)) best = i;
    ++out[best];
  }
  return out;
}

}  // namespace

std::vector<Node> largest(std::vector<Node> nodes, size_t count) {
  std::stable_sort(nodes.begin(), nodes.end(),
                   [](const Node& a, const Node& b) { return a.cpus.size() > b.cpus.size(); });
  nodes.resize(std::min(count, nodes.size()));
  std::sort(nodes.begin(), nodes.end(), [](const Node& a, const Node& b) { return a.id < b.id; });
  return nodes;
}

std::vector<NodeShare> share_threads(const std::vector<Node>& nodes, int threads) {
  std::vector<int64_t> weights;
  for (const Node& n : nodes) weights.push_back(int64_t(n.cpus.size()));
  const std::vector<int64_t> counts = apportion(weights, threads);
  std::vector<NodeShare> out;
  for (size_t i = 0; i < nodes.size(); ++i) out.push_back({nodes[i], int(counts[i])});
  return out;
}

std::vector<int64_t> share_slices(const std::vector<NodeShare>& shares, int64_t slices) {
  std::vector<int64_t> weights;
  for (const NodeShare& s : shares) weights.push_back(s.threads);
  const std::vector<int64_t> counts = apportion(weights, slices);
  std::vector<int64_t> out{0};
  for (int64_t n : counts) out.push_back(out.back() + n);
  return out;
}

void bind_thread(const Node& node) {
  const size_t sets = size_t(*std::max_element(node.cpus.begin(), node.cpus.end())) / CPU_SETSIZE;
  std::vector<cpu_set_t> mask(sets + 1);
  const size_t bytes = mask.size() * sizeof(cpu_set_t);
  for (int cpu : node.cpus) CPU_SET_S(size_t(cpu), bytes, mask.data());
  attempt(kAffinity, [&] { return sched_setaffinity(0, bytes, mask.data()); });
  const NodeMask nodes(node.id);  // threads inherit a policy, such as numactl's interleaving
  attempt(kMempolicy, [&] {
    return syscall(SYS_set_mempolicy, MPOL_PREFERRED, nodes.words.data(), nodes.bits);
  });
}

void bind_memory(void* at, int64_t bytes, const Node& node) {
  const auto page = uintptr_t(sysconf(_SC_PAGESIZE)), first = uintptr_t(at);
  const uintptr_t begin = first / page * page, end = (first + uintptr_t(bytes)) / page * page;
  if (end <= begin) return;
  const NodeMask nodes(node.id);
  // Preferred, not bound: a full node must make experts slower, not the process end.
  attempt(kMbind, [&] {
    return syscall(SYS_mbind, begin, end - begin, MPOL_PREFERRED, nodes.words.data(), nodes.bits,
                   0);
  });
}

std::vector<std::string> refusals() {
  std::lock_guard lock(calls_mutex);
  std::vector<std::string> out;
  std::swap(out, refused);
  return out;
}

void refuse_call(const std::string& call, int error) {
  std::lock_guard lock(calls_mutex);
  const auto found =
      std::find_if(calls.begin(), calls.end(), [&](auto& c) { return call == c.name; });
  if (found == calls.end()) throw std::invalid_argument("no such call: " + call);
  found->forced = error, found->told = false;
}

}  // namespace kt
