"""CPU kernels, packing, loading and serving for the routed experts of MoE models."""

import platform
import sys

if sys.platform != "linux" or platform.machine() != "x86_64":
    raise ImportError(
        "kt_core needs Linux (or WSL2) on an x86-64 processor; this is "
        f"{platform.system()} on {platform.machine() or 'an unknown processor'}."
    )

from kt_core.runtime import kernels

__all__ = ["kernels"]
