// Runs AMX instructions of an unmodified program on a CPU without AMX: preload this library
// (LD_PRELOAD), and every such instruction, which the CPU refuses with SIGILL, is decoded, executed
// by tiles.h for the thread that met it, and stepped over. Tests only.
//
// sigaction() and signal() are interposed, so that a handler that the program installs for SIGILL
// (faulthandler, pytest) comes after this one. Faults that hardware would raise reach the program.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>

#include "tiles.h"

namespace {

using amx::Fault;
using amx::State;

enum Op {
  kLdtilecfg,
  kSttilecfg,
  kTilerelease,
  kTilezero,
  kTileloadd,
  kTilestored,
  kTdpbssd,
  kTdpbsud,
  kTdpbusd,
  kTdpbuud,
  kTdpbf16ps,
  kOps
};
constexpr const char* kNames[kOps] = {"ldtilecfg", "sttilecfg",  "tilerelease", "tilezero",
                                      "tileloadd", "tilestored", "tdpbssd",     "tdpbsud",
                                      "tdpbusd",   "tdpbuud",    "tdpbf16ps"};

std::atomic<uint64_t> counts[kOps], traps;
std::atomic<int> configured;  // threads whose tiles are configured

// A pointer only: initial-exec TLS of a preloaded library is scarce. Never freed.
thread_local State* mine __attribute__((tls_model("initial-exec")));

State& state() {
  if (!mine)
    mine = (State*)mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
  return *mine;
}

struct Instruction {
  Op op;
  int reg, rm, vvvv;
  int64_t length;
  uint8_t* address;
  int64_t stride;
};

constexpr int kRegister[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                               REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                               REG_R12, REG_R13, REG_R14, REG_R15};

// The memory operand of modrm (at p, rex bits in x and b). Tile loads and stores take the scaled
// index as their stride instead of adding it.
void decode_memory(const uint8_t* p, int x, int b, const greg_t* g, const uint8_t* start,
                   bool strided, Instruction& in) {
  const int mod = *p >> 6, rm = *p & 7;
  int64_t base = 0, index = 0;
  int32_t disp = 0;
  bool wide = mod == 2, from_rip = false;
  ++p;
  if (rm == 4) {
    const int sib = *p++, scale = sib >> 6, i = (sib >> 3 & 7) | x << 3, r = sib & 7;
    if (i != 4) index = int64_t(uint64_t(g[kRegister[i]]) << scale);
    if (r == 5 && mod == 0) {
      wide = true;
    } else {
      base = g[kRegister[r | b << 3]];
    }
  } else if (rm == 5 && mod == 0) {
    wide = from_rip = true;
  } else {
    base = g[kRegister[rm | b << 3]];
  }
  if (wide) {
    std::memcpy(&disp, p, 4), p += 4;
  } else if (mod == 1) {
    disp = int8_t(*p++);
  }
  in.length = p - start;
  if (from_rip) base = int64_t(p);
  in.stride = strided ? index : 0;
  in.address = (uint8_t*)(base + (strided ? 0 : index) + disp);
}

// All are three-byte VEX in map 0f38 with W = L = 0: c4, RXB.00010, 0.vvvv.0.pp, opcode, modrm.
bool decode(const uint8_t* p, const greg_t* g, Instruction& in) {
  if (p[0] != 0xc4 || (p[1] & 31) != 2 || (p[2] & 0x84)) return false;
  const int r = !(p[1] & 0x80), x = !(p[1] & 0x40), b = !(p[1] & 0x20);
  const int prefix = p[2] & 3, opcode = p[3], mod = p[4] >> 6;  // prefix: none, 66, f3, f2
  in = {kOps, (p[4] >> 3 & 7) | r << 3, (p[4] & 7) | b << 3, (~p[2] >> 3) & 15, 5, nullptr, 0};
  if (mod == 3 && (opcode == 0x5e || opcode == 0x5c)) {
    constexpr Op by_prefix[4] = {kTdpbuud, kTdpbusd, kTdpbsud, kTdpbssd};
    if (opcode == 0x5c && prefix != 2) return false;
    in.op = opcode == 0x5e ? by_prefix[prefix] : kTdpbf16ps;
    return (in.reg | in.rm | in.vvvv) < 8;
  }
  if (in.vvvv) return false;
  if (opcode == 0x49 && mod == 3) {
    in.op = prefix == 0 ? kTilerelease : kTilezero;
    return prefix == 0 ? p[4] == 0xc0 : prefix == 3 && in.rm == 0 && in.reg < 8;
  }
  if (opcode == 0x49) {
    in.op = prefix == 0 ? kLdtilecfg : kSttilecfg;
    if (in.reg != 0 || prefix > 1) return false;
  } else if (opcode == 0x4b) {
    in.op = prefix == 2 ? kTilestored : kTileloadd;  // 66: the non-temporal load
    if (mod == 3 || (p[4] & 7) != 4 || prefix == 0 || in.reg > 7) return false;
  } else {
    return false;
  }
  decode_memory(p + 4, x, b, g, p, opcode == 0x4b, in);
  return true;
}

Fault execute(State& s, const Instruction& in) {
  switch (in.op) {
    case kLdtilecfg:
      return load_config(s, in.address);
    case kSttilecfg:
      return store_config(s, in.address), Fault::kNone;
    case kTilerelease:
      return release(s), Fault::kNone;
    case kTilezero:
      return zero(s, in.reg);
    case kTileloadd:
      return load(s, in.reg, in.address, in.stride);
    case kTilestored:
      return store(s, in.reg, in.address, in.stride);
    case kTdpbssd:
      return amx::multiply_bytes<int8_t, int8_t>(s, in.reg, in.rm, in.vvvv);
    case kTdpbsud:
      return amx::multiply_bytes<int8_t, uint8_t>(s, in.reg, in.rm, in.vvvv);
    case kTdpbusd:
      return amx::multiply_bytes<uint8_t, int8_t>(s, in.reg, in.rm, in.vvvv);
    case kTdpbuud:
      return amx::multiply_bytes<uint8_t, uint8_t>(s, in.reg, in.rm, in.vvvv);
    case kTdpbf16ps:
      return amx::multiply_bf16(s, in.reg, in.rm, in.vvvv);
    case kOps:
      break;
  }
  return Fault::kUndefined;
}

struct sigaction program;  // what the program wants done on SIGILL
int real_sigaction(int n, const struct sigaction* a, struct sigaction* o) {
  static const auto next = (decltype(&sigaction))dlsym(RTLD_NEXT, "sigaction");
  return next(n, a, o);
}

void pass_on(int n, siginfo_t* info, void* context) {
  if (program.sa_flags & SA_SIGINFO) return program.sa_sigaction(n, info, context);
  if (program.sa_handler != SIG_DFL && program.sa_handler != SIG_IGN) return program.sa_handler(n);
  struct sigaction fallback = {};
  fallback.sa_handler = SIG_DFL;
  real_sigaction(SIGILL, &fallback, nullptr);  // the instruction runs again and ends the program
}

void on_illegal(int n, siginfo_t* info, void* context) {
  greg_t* g = ((ucontext_t*)context)->uc_mcontext.gregs;
  int done = 0;
  for (Instruction in; decode((const uint8_t*)g[REG_RIP], g, in); ++done) {  // runs in one trap
    State& s = state();
    const int before = s.palette;
    if (execute(s, in) != Fault::kNone) break;
    configured += s.palette - before;
    counts[in.op].fetch_add(1, std::memory_order_relaxed);
    g[REG_RIP] += in.length;
  }
  if (!done) return pass_on(n, info, context);
  traps.fetch_add(1, std::memory_order_relaxed);
}

__attribute__((constructor)) void install() {
  struct sigaction ours = {};
  ours.sa_sigaction = on_illegal;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  real_sigaction(SIGILL, &ours, &program);
}

}  // namespace

extern "C" {

// For the tests, by ctypes. 0 for an unknown name.
uint64_t amx_count(const char* name) {
  for (int i = 0; i < kOps; ++i)
    if (!std::strcmp(name, kNames[i])) return counts[i];
  return 0;
}
uint64_t amx_traps() { return traps; }
int amx_configured_threads() { return configured; }

int sigaction(int n, const struct sigaction* a, struct sigaction* o) noexcept {
  if (n != SIGILL) return real_sigaction(n, a, o);
  const struct sigaction before = program;
  if (a) program = *a;
  if (o) *o = before;
  return 0;
}

sighandler_t signal(int n, sighandler_t handler) noexcept {
  static const auto next = (decltype(&signal))dlsym(RTLD_NEXT, "signal");
  if (n != SIGILL) return next(n, handler);
  const sighandler_t before = program.sa_handler;
  program = {};
  program.sa_handler = handler;
  return before;
}

}  // extern "C"
