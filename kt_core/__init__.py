"""CPU kernels, packing, loading and serving for the routed experts of MoE models."""

from kt_core.runtime import kernels

__all__ = ["kernels"]
