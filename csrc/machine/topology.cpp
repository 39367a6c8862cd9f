// See topology.h. Numbers are read by streams: newer glibc headers turn strtol and sscanf into
// symbols that manylinux_2_28 lacks.
#include "machine/topology.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <thread>

namespace kt {
namespace {

constexpr double kNoQuota = std::numeric_limits<double>::infinity();
constexpr int kMaxCpus = 1 << 16;  // Linux is built for 8192 at most

std::string text(const std::string& path) {
  std::ifstream f(path);
  return {std::istreambuf_iterator<char>(f), {}};
}

std::vector<std::string> split(const std::string& s, char separator) {
  std::vector<std::string> out;
  std::istringstream in(s);
  for (std::string part; std::getline(in, part, separator);) out.push_back(part);
  return out;
}

bool contains(const auto& list, const auto& value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// The root without its last slash: what absolute paths are appended to.
std::string prefix(std::string root) {
  while (!root.empty() && root.back() == '/') root.pop_back();
  return root;
}

// "0-3,8" as 0 1 2 3 8.
std::vector<int> id_list(const std::string& s) {
  std::vector<int> out;
  std::istringstream in(s);
  for (int first; in >> first;) {
    int last = first;
    if (in.peek() == '-') in.get(), in >> last;
    for (int i = first; i <= std::min(last, kMaxCpus); ++i) out.push_back(i);
    if (in.peek() == ',') in.get();
  }
  return out;
}

// -- cgroups

struct Mount {
  std::string top;    // the cgroup that the mount shows at its point
  std::string point;  // the directory, `root` included
};

// Where the cgroups of one version are mounted; of version 1, those of the controller.
std::vector<Mount> cgroup_mounts(const std::string& root, const std::string& controller, bool v2) {
  std::vector<Mount> out;
  // id parent device top point options [tags ...] - type source options
  for (const std::string& line : split(text(root + "/proc/self/mountinfo"), '\n')) {
    const std::vector<std::string> words = split(line, ' ');
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (dash - words.begin() < 6 || words.end() - dash < 4) continue;
    if (v2 ? dash[1] == "cgroup2"
           : dash[1] == "cgroup" && contains(split(dash[3], ','), controller))
      out.push_back({prefix(words[3]), root + words[4]});
  }
  if (out.empty()) out.push_back({"", root + "/sys/fs/cgroup" + (v2 ? "" : "/" + controller)});
  return out;
}

// Directories from that of the cgroup `path` up to the mount's point.
void add_cgroups(const std::string& root, const std::string& controller, const std::string& path,
                 bool v2, std::vector<Cgroup>& out) {
  const std::vector<Mount> mounts = cgroup_mounts(root, controller, v2);
  bool seen = false;
  for (const Mount& m : mounts) {
    // A container may show its own cgroup as the mount's top, yet name it by the host's path.
    const bool below = (path + "/").rfind(m.top + "/", 0) == 0;
    if (!below || path.find("/..") != std::string::npos) continue;
    std::string inside = prefix(path.substr(m.top.size()));  // "" or "/a/b"
    for (; !inside.empty(); inside.resize(inside.rfind('/'))) out.push_back({m.point + inside, v2});
    out.push_back({m.point, v2});
    seen = true;
  }
  // Our cgroup lies outside of what is mounted: the mount's top is as near as we can see.
  if (!seen) out.push_back({mounts[0].point, v2});
}

double quota_in(const Cgroup& group) {
  const std::string& at = group.directory;
  std::istringstream in(group.v2
                            ? text(at + "/cpu.max")
                            : text(at + "/cpu.cfs_quota_us") + text(at + "/cpu.cfs_period_us"));
  double quota = 0, period = 0;  // microseconds; "max" and -1 are no quota
  return in >> quota >> period && quota > 0 && period > 0 ? quota / period : kNoQuota;
}

// -- nodes

std::string node_file(const std::string& root, int id, const char* name) {
  return text(root + "/sys/devices/system/node/node" + std::to_string(id) + "/" + name);
}

// MemTotal of "Node 0 MemTotal:  16384 kB" in bytes; -1 where the file does not say.
int64_t node_memory(const std::string& root, int id) {
  const std::string info = node_file(root, id, "meminfo"), key = "MemTotal:";
  const size_t at = info.find(key);
  if (at == std::string::npos) return -1;
  std::istringstream in(info.substr(at + key.size()));
  int64_t kib;
  return in >> kib ? kib << 10 : -1;
}

// Nodes whose memory the cpuset allows; all of `online` where the system does not say.
std::vector<int> allowed_memory(const std::string& root, const std::vector<int>& online) {
  const std::string status = text(root + "/proc/self/status"), key = "\nMems_allowed_list:";
  const size_t at = status.find(key);
  return at == std::string::npos ? online : id_list(status.substr(at + key.size()));
}

// The one of `homes` nearest to node `id`, whose distances are listed in the order of `online`.
int nearest(const std::string& root, int id, const std::vector<int>& online,
            const std::map<int, Node>& homes) {
  std::istringstream in(node_file(root, id, "distance"));
  int best = homes.begin()->first;
  int least = std::numeric_limits<int>::max();
  for (int other : online) {
    int distance;
    if (!(in >> distance)) break;
    if (distance < least && homes.count(other)) best = other, least = distance;
  }
  return best;
}

// Puts one CPU of every core first.
void order_by_core(const std::string& root, Node& node) {
  std::vector<int> first, siblings;
  std::set<int> cores;
  for (int cpu : node.cpus) {
    const std::vector<int> core =
        id_list(text(root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                     "/topology/thread_siblings_list"));
    const bool is_new = cores.insert(core.empty() ? cpu : core[0]).second;
    (is_new ? first : siblings).push_back(cpu);
  }
  node.cores = int(first.size());
  node.cpus = std::move(first);
  node.cpus.insert(node.cpus.end(), siblings.begin(), siblings.end());
}

}  // namespace

std::vector<int> affinity() {
  // The kernel refuses a mask shorter than its own, and that may exceed one cpu_set_t (1024 CPUs).
  for (size_t n = 1; n * CPU_SETSIZE <= kMaxCpus; n *= 2) {
    std::vector<cpu_set_t> mask(n);
    const size_t bytes = n * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, mask.data())) continue;
    std::vector<int> out;
    for (size_t i = 0; i < n * CPU_SETSIZE; ++i)
      if (CPU_ISSET_S(i, bytes, mask.data())) out.push_back(int(i));
    return out;
  }
  std::vector<int> all;
  for (int i = 0; i < int(std::max(1u, std::thread::hardware_concurrency())); ++i) all.push_back(i);
  return all;
}

std::vector<Cgroup> cgroups(const std::string& controller, const std::string& at) {
  const std::string root = prefix(at);
  std::vector<std::string> lines = split(text(root + "/proc/self/cgroup"), '\n');
  if (lines.empty()) lines = {"0::/", "1:" + controller + ":/"};
  std::vector<Cgroup> out;
  for (const std::string& line : lines) {
    // id:controllers:path, and of version 2 no controllers
    const size_t a = line.find(':'), b = line.find(':', a + 1);
    if (a == std::string::npos || b == std::string::npos) continue;
    const std::string controllers = line.substr(a + 1, b - a - 1);
    const bool v2 = controllers.empty();
    if (v2 || contains(split(controllers, ','), controller))
      add_cgroups(root, controller, line.substr(b + 1), v2, out);
  }
  return out;
}

double cpu_quota(const std::string& root) {
  double least = kNoQuota;
  for (const Cgroup& group : cgroups("cpu", root)) least = std::min(least, quota_in(group));
  return least;
}

int allowed_cpus(const std::string& root, const std::vector<int>& cpus) {
  const double quota = std::round(std::min(cpu_quota(root), double(kMaxCpus)));
  return std::max(1, std::min(int(cpus.size()), int(quota)));
}

int allowed_cpus() { return allowed_cpus("/", affinity()); }

Topology topology(const std::string& at, const std::vector<int>& cpus) {
  const std::string root = prefix(at);
  Topology t{{}, allowed_cpus(root, cpus)};
  const std::vector<int> online = id_list(text(root + "/sys/devices/system/node/online"));
  const std::vector<int> usable = allowed_memory(root, online);
  std::map<int, Node> homes;  // the nodes with memory
  for (int id : online) {
    const int64_t memory = node_memory(root, id);
    if (memory && contains(usable, id)) homes[id] = {id, {}, 0, std::max<int64_t>(memory, 0)};
  }
  if (homes.empty()) homes[0] = {};
  std::map<int, int> home;  // of a CPU
  for (int id : online) {
    const int place = homes.count(id) ? id : nearest(root, id, online, homes);
    for (int cpu : id_list(node_file(root, id, "cpulist"))) home[cpu] = place;
  }
  for (int cpu : cpus) {
    const auto found = home.find(cpu);
    homes[found == home.end() ? homes.begin()->first : found->second].cpus.push_back(cpu);
  }
  for (auto& [id, node] : homes) {
    if (node.cpus.empty()) continue;
    order_by_core(root, node);
    t.nodes.push_back(std::move(node));
  }
  return t;
}

}  // namespace kt
