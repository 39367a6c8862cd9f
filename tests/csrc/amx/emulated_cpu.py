"""A pytest plugin: with trap.cpp preloaded, this CPU passes for one that has AMX."""

import os

from kt_core import _kt, runtime

_AMX_BITS = 1 << 22 | 1 << 24 | 1 << 25  # leaf 7 EDX: amx_bf16, amx_tile, amx_int8
_TILE_STATE = 0x60000  # XCR0

EMULATOR = os.environ.get("LD_PRELOAD")
if EMULATOR:
    found = _kt.cpu_registers()
    edx, xcr0 = found["leaf7_edx"] | _AMX_BITS, found["xcr0"] | _TILE_STATE
    _kt.testing.use_cpu({**found, "leaf7_edx": edx, "xcr0": xcr0, "tiles": True})
runtime.force_isa("amx")
