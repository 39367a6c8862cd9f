// Whether the calling thread has tiles configured, asked of the processor (or of trap.cpp). Tests
// only.
#include <cstdint>

extern "C" int tiles_configured_here() {
  struct alignas(64) {
    uint8_t palette, rest[63];
  } config;
  asm volatile("sttilecfg %0" : "=m"(config));
  return config.palette;
}
