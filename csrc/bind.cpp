// Python bindings: addresses and sizes in, exceptions out. Tensors are checked by
// kt_core/experts.py; nothing here knows torch. Every call that computes releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>

#include "gemm/registry.h"
#include "machine/arena.h"
#include "machine/numa.h"
#include "machine/parallel.h"
#include "machine/recycled_buffer.h"
#include "machine/topology.h"
#include "moe/moe.h"

namespace py = pybind11;
using namespace kt;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

struct SleepUnlessDone {
  bool done = false;
  ~SleepUnlessDone() {
    while (!done) pause();
  }
};

// Not inlined into a destructor, which would end the process when the thread is unwound.
__attribute__((noinline)) void take_gil(PyThreadState* thread) {
  SleepUnlessDone guard;
  PyEval_RestoreThread(thread);
  guard.done = true;
}

// While it lives, other Python threads run. Once the interpreter is at its end, CPython before 3.14
// unwinds a daemon thread that asks for the GIL, through C++ frames that may not be left so or
// would touch Python's objects: that thread sleeps here until the process is gone, as 3.14 has it.
struct NoGil {
  PyThreadState* thread = PyEval_SaveThread();
  ~NoGil() { take_gil(thread); }
};

// "32, 64, 128 or 0 (per channel)"
std::string listed(const int* groups, int count) {
  std::string out;
  for (int i = 0; i < count; ++i)
    out += (i == 0           ? ""
            : i + 1 == count ? " or "
                             : ", ") +
           std::to_string(groups[i]) + (groups[i] ? "" : " (per channel)");
  return out;
}

// One layer over a buffer that Python owns and this object keeps alive.
struct BoundLayer {
  Layer l;
  py::object owner;  // an Arena or any buffer
  const Arena* arena = nullptr;

  BoundLayer(int64_t experts, int64_t hidden, int64_t intermediate, const std::string& format,
             int64_t group, int act, int64_t slices)
      : l{experts, hidden, intermediate, group, format, Act(act), nullptr, slices} {
    const Kernel& k = *find_kernel(format).kernel;
    if (!k.stored.scaled()) l.group = 0;
    if (std::find(k.groups, k.groups + k.group_count, l.group) == k.groups + k.group_count)
      throw std::invalid_argument("group is " + std::to_string(group) + "; format " + format +
                                  " takes " + listed(k.groups, k.group_count));
    if (slices < 1 || slices > max_slices(l))
      throw std::invalid_argument("slices is " + std::to_string(slices) +
                                  "; an intermediate size of " + std::to_string(intermediate) +
                                  " in format " + format + " can be cut into 1 to " +
                                  std::to_string(max_slices(l)));
  }
  int64_t nbytes() const { return layer_bytes(l); }
  void attach(const py::object& b) {
    arena = py::isinstance<Arena>(b) ? b.cast<const Arena*>() : nullptr;
    auto info = py::cast<py::buffer>(b).request();
    auto address = reinterpret_cast<uintptr_t>(info.ptr);
    if (info.size * info.itemsize < nbytes() || address % kAlign)
      throw std::invalid_argument("buffer holds " + std::to_string(info.size * info.itemsize) +
                                  " bytes at alignment " + std::to_string(address % kAlign) +
                                  "; this layer needs " + std::to_string(nbytes()) +
                                  " bytes aligned to 64");
    owner = b;
    l.data = at<uint8_t>(address);
  }
  // The layer, once it is known that its memory is there.
  const Layer& ready() const {
    if (arena) arena->data();
    return l;
  }
};

// -- the arguments of a pass, as kt_core/experts.py fills them: addresses of checked tensors -----
// By projection: gate, up, down; rank 0 where there is no adapter.
Lora make_lora(const std::vector<uintptr_t>& a, const std::vector<uintptr_t>& b,
               const std::vector<int64_t>& r, const std::vector<float>& scaling, int dtype,
               float dropout, uint64_t seed) {
  Lora lora;
  for (size_t p = 0; p < 3; ++p)
    lora.a[p] = at<void>(a[p]), lora.b[p] = at<void>(b[p]), lora.r[p] = r[p],
    lora.scaling[p] = scaling[p];
  lora.type = DType(dtype), lora.dropout = dropout, lora.seed = seed;
  return lora;
}

// parts: [(tokens, seed), ...] of a batch that several processes have put together.
Batch make_batch(int64_t tokens, int64_t top_k, uintptr_t x, uintptr_t index, uintptr_t weight,
                 uintptr_t mine, const std::vector<std::pair<int64_t, uint64_t>>& parts) {
  Batch b{tokens, top_k, at<bf16>(x), at<int64_t>(index), at<float>(weight), at<uint8_t>(mine)};
  for (auto [n, seed] : parts) b.parts.push_back({n, seed});
  return b;
}

Output make_output(uintptr_t address, bool rounded) {
  if (rounded) return {nullptr, at<bf16>(address)};
  return {at<float>(address), nullptr};
}

Grads make_grads(const Output& dx, uintptr_t dw, const std::vector<uintptr_t>& da,
                 const std::vector<uintptr_t>& db) {
  Grads g{dx, at<float>(dw), {}, {}};
  for (size_t p = 0; p < 3; ++p) g.da[p] = at<float>(da[p]), g.db[p] = at<float>(db[p]);
  return g;
}

py::list list_kernels() {
  py::list out;
  for (auto& e : registry()) {
    py::dict d;
    d["isa"] = e.kernel->isa;
    d["format"] = e.kernel->format;
    d["usable"] = e.usable;
    d["missing"] = missing_features(e.kernel->cpu);
    d["needs"] = e.kernel->cpu;
    d["slow_on"] = e.kernel->slow_on;
    d["slow_here"] = cpu().vendor == e.kernel->slow_on;
    d["bf16_products"] = e.kernel->a_size == size_of(DType::kBf16);
    d["bits"] = e.kernel->stored.bits;
    d["scale_bits"] = 8 * e.kernel->stored.scale_size;
    d["zeros"] = e.kernel->stored.zeros;
    d["factor"] = e.kernel->stored.factor;
    d["codes"] = e.kernel->codes;
    d["groups"] = std::vector<int>(e.kernel->groups, e.kernel->groups + e.kernel->group_count);
    d["default_group"] = e.kernel->default_group;
    d["int8_domain"] = e.kernel->quad_size > 0;
    d["int16_pays"] = e.kernel->int16_pays;
    d["calls"] = e.calls->load();
    out.append(d);
  }
  return out;
}

// None, or the registers as a dict with the names of CpuRegisters.
void bind_use_cpu(const std::optional<py::dict>& fake) {
  if (!fake) return use_cpu({});
  auto u32 = [&](const char* name) { return (*fake)[name].cast<uint32_t>(); };
  use_cpu(CpuRegisters{u32("leaf1_ecx"), u32("leaf7_ebx"), u32("leaf7_ecx"), u32("leaf7_edx"),
                       u32("leaf71_eax"), (*fake)["xcr0"].cast<uint64_t>(),
                       (*fake)["tiles"].cast<bool>(), (*fake)["vendor"].cast<std::string>()});
}

py::dict cpu_registers() {
  const CpuRegisters& c = cpu();
  py::dict d;
  d["leaf1_ecx"] = c.leaf1_ecx, d["leaf7_ebx"] = c.leaf7_ebx, d["leaf7_ecx"] = c.leaf7_ecx;
  d["leaf7_edx"] = c.leaf7_edx, d["leaf71_eax"] = c.leaf71_eax;
  d["xcr0"] = c.xcr0, d["tiles"] = c.tiles, d["vendor"] = c.vendor;
  return d;
}

// (threads, [(id, cpus, cores, memory), ...]) below a root, of this process's CPUs or of others.
py::tuple bind_topology(const std::string& root, const std::optional<std::vector<int>>& cpus) {
  const Topology t = topology(root, cpus ? *cpus : affinity());
  py::list nodes;
  for (const Node& n : t.nodes) nodes.append(py::make_tuple(n.id, n.cpus, n.cores, n.memory));
  return py::make_tuple(t.threads, nodes);
}

// [(directory, of version 2), ...] of a controller's cgroups, this process's own first.
py::list bind_cgroups(const std::string& controller, const std::string& root) {
  py::list out;
  for (const Cgroup& c : cgroups(controller, root)) out.append(py::make_tuple(c.directory, c.v2));
  return out;
}

// How a machine's nodes, below a root, would share threads and slices: [(id, cpus, threads, first
// slice, end), ...] of the `count` nodes with the most CPUs.
py::list bind_share(const std::string& root, const std::vector<int>& cpus, size_t count,
                    int threads, int64_t slices) {
  const std::vector<NodeShare> shares =
      share_threads(largest(topology(root, cpus).nodes, count), threads);
  const std::vector<int64_t> owners = share_slices(shares, slices);
  py::list out;
  for (size_t i = 0; i < shares.size(); ++i)
    out.append(py::make_tuple(shares[i].node.id, shares[i].node.cpus, shares[i].threads, owners[i],
                              owners[i + 1]));
  return out;
}

// [(node id, workers, [cpus of a worker, ...]), ...]
py::list bind_node_workers() {
  py::list out;
  for (const NodeWorkers& c : node_workers()) out.append(py::make_tuple(c.node, c.workers, c.cpus));
  return out;
}

void bind_machine(py::module_& m) {
  m.def("kernels", &list_kernels);
  m.def("current_isa", &current_isa);
  m.def("force_isa", &force_isa, py::arg("name"));
  m.def("cpu_registers", &cpu_registers);
  m.def("tiles_refused", &tiles_refused);
  m.def("allowed_cpus", [] { return allowed_cpus(); });
  m.def("topology", &bind_topology, py::arg("root") = "/", py::arg("cpus") = py::none());
  m.def("cgroups", &bind_cgroups, py::arg("controller"), py::arg("root") = "/");
  m.def("threads", &threads);
  m.def(
      "set_threads", [](int n) { set_threads(n); }, py::arg("n"),
      py::call_guard<NoGil>());  // waits for the call in flight
  m.def("use_openmp", &use_openmp, py::arg("parallel"), py::arg("max_threads"),
        py::call_guard<NoGil>());
  m.def("in_openmp", &in_openmp);
  m.def("set_nodes", &set_nodes, py::arg("n"), py::call_guard<NoGil>());
  m.def("check_nodes", &check_nodes, py::arg("n"));
  m.def("available_nodes", &available_nodes);
  m.def("nodes", &nodes, py::call_guard<NoGil>());
  m.def("share", &bind_share, py::arg("root"), py::arg("cpus"), py::arg("nodes"),
        py::arg("threads"), py::arg("slices"));
  m.def("refusals", &refusals);
}

// What only tests ask for.
void bind_testing(py::module_ m) {
  m.def("use_cpu", &bind_use_cpu, py::arg("registers"));
  m.def(
      "set_threads", [](int n) { set_threads(n, true); }, py::arg("n"), py::call_guard<NoGil>(),
      "As _kt.set_threads, also above the allowed CPUs.");
  m.def("pretend_nodes", &pretend_nodes, py::arg("n"));
  m.def("node_workers", &bind_node_workers);
  m.def("refuse_call", &refuse_call, py::arg("name"), py::arg("error"));
  m.def("delay_tasks", &delay_tasks, py::arg("microseconds"));
  m.def("fail_tasks", &fail_tasks, py::arg("worker"));
  m.def("workers_seen", &workers_seen);
}

template <class T>
void bind_buffer(py::module_& m, const char* name) {
  py::class_<T>(m, name, py::buffer_protocol())
      .def(py::init<int64_t>(), py::arg("nbytes"))
      .def_buffer([](T& memory) {
        return py::buffer_info(memory.data(), 1, py::format_descriptor<uint8_t>::format(),
                               memory.bytes());
      });
}

// Each an address and strides in elements; 0: none.
Codes make_codes(std::tuple<uintptr_t, int64_t, int64_t> codes,
                 std::tuple<uintptr_t, int64_t, int64_t> scales,
                 std::tuple<uintptr_t, int64_t, int64_t> zeros,
                 std::tuple<uintptr_t, int64_t> factor) {
  return {at<uint8_t>(std::get<0>(codes)), std::get<1>(codes),  std::get<2>(codes),
          at<float>(std::get<0>(scales)),  std::get<1>(scales), std::get<2>(scales),
          at<uint8_t>(std::get<0>(zeros)), std::get<1>(zeros),  std::get<2>(zeros),
          at<float>(std::get<0>(factor)),  std::get<1>(factor)};
}

void bind_arguments(py::module_& m) {
  py::class_<Codes>(m, "Codes")
      .def(py::init(&make_codes), py::kw_only(), py::arg("codes"), py::arg("scales"),
           py::arg("zeros"), py::arg("factor"));
  py::class_<Batch>(m, "Batch")
      .def(py::init(&make_batch), py::kw_only(), py::arg("tokens"), py::arg("top_k"), py::arg("x"),
           py::arg("index"), py::arg("weight"), py::arg("mine") = 0,
           py::arg("parts") = std::vector<std::pair<int64_t, uint64_t>>{});
  py::class_<Lora>(m, "Lora").def(py::init(&make_lora), py::kw_only(), py::arg("a"), py::arg("b"),
                                  py::arg("r"), py::arg("scaling"), py::arg("dtype"),
                                  py::arg("dropout"), py::arg("seed"));
  py::class_<Output>(m, "Output")
      .def(py::init(&make_output), py::arg("address"), py::arg("rounded"));
  py::class_<Grads>(m, "Grads")
      .def(py::init(&make_grads), py::kw_only(), py::arg("dx"), py::arg("dw"), py::arg("da"),
           py::arg("db"));
}

void bind_layer(py::module_& m) {
  py::class_<BoundLayer>(m, "Layer")
      .def(py::init<int64_t, int64_t, int64_t, const std::string&, int64_t, int, int64_t>(),
           py::arg("experts"), py::arg("hidden"), py::arg("intermediate"), py::arg("format"),
           py::arg("group"), py::arg("act"), py::arg("slices") = 1)
      .def_property_readonly("nbytes", &BoundLayer::nbytes)
      .def_property_readonly(
          "int16_pays",
          [](const BoundLayer& b) { return find_kernel(b.l.format).kernel->int16_pays; })
      .def_property_readonly("group", [](const BoundLayer& b) { return b.l.group; })
      .def_property_readonly("max_slices", [](const BoundLayer& b) { return max_slices(b.l); })
      .def("attach", &BoundLayer::attach, py::arg("buffer"))
      .def("bind_slices",
           [](BoundLayer& b) {
             const Layer& l = b.ready();
             NoGil nogil;
             bind_slices(l);
           })
      .def(
          "pack",
          [](BoundLayer& b, int64_t e, int p, uintptr_t src, int dtype, int64_t ld) {
            const Layer& l = b.ready();
            NoGil nogil;
            return pack_matrix(l, e, p, at<void>(src), DType(dtype), ld);
          },
          py::arg("expert"), py::arg("projection"), py::arg("source"), py::arg("dtype"),
          py::arg("ld"))
      .def(
          "pack_codes",
          [](BoundLayer& b, int64_t e, int p, const Codes& codes) {
            const Layer& l = b.ready();
            NoGil nogil;
            return pack_codes(l, e, p, codes);
          },
          py::arg("expert"), py::arg("projection"), py::arg("codes"))
      .def(
          "unpack",
          [](BoundLayer& b, int64_t e, int p, uintptr_t out) {
            const Layer& l = b.ready();
            NoGil nogil;
            unpack_matrix(l, e, p, at<float>(out));
          },
          py::arg("expert"), py::arg("projection"), py::arg("out"))
      .def(
          "forward",
          [](BoundLayer& b, const Batch& batch, const Lora* lora, int compute, const Output& out,
             uintptr_t saved) {
            const Layer& l = b.ready();
            NoGil nogil;
            moe_forward(l, batch, lora ? *lora : Lora{}, Compute(compute), out, at<bf16>(saved));
          },
          py::arg("batch"), py::arg("lora"), py::arg("compute"), py::arg("out"), py::arg("saved"))
      .def(
          "backward",
          [](BoundLayer& b, const Batch& batch, const Lora* lora, int compute, uintptr_t dy,
             uintptr_t saved, const Grads& grads) {
            const Layer& l = b.ready();
            NoGil nogil;
            moe_backward(l, batch, lora ? *lora : Lora{}, Compute(compute), at<bf16>(dy),
                         at<bf16>(saved), grads);
          },
          py::arg("batch"), py::arg("lora"), py::arg("compute"), py::arg("dy"), py::arg("saved"),
          py::arg("grads"));
}

}  // namespace

PYBIND11_MODULE(_kt, m) {
  m.doc() = "Expert kernels; see kt_core/experts.py for the checked interface.";
  bind_machine(m);
  bind_testing(m.def_submodule("testing", "Switches that only tests use."));
  bind_buffer<Arena>(m, "Arena");
  bind_buffer<RecycledBuffer>(m, "RecycledBuffer");
  m.def("recycled_bytes", &recycled_bytes);
  m.def("release_recycled", &release_recycled);
  bind_arguments(m);
  bind_layer(m);
}
