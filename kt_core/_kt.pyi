"""The extension that csrc/bind.cpp defines. Addresses are those of checked tensors; 0 is none."""

from collections.abc import Sequence
from typing import TypedDict

from typing_extensions import Buffer

class KernelInfo(TypedDict):
    """A tier's kernels for one weight format; see kt_core/runtime.py: kernels()."""

    isa: str
    format: str
    usable: bool
    missing: str
    needs: str
    slow_on: str
    slow_here: bool
    bf16_products: bool
    bits: int
    scale_bits: int
    zeros: bool
    factor: bool
    codes: str
    groups: list[int]
    default_group: int
    int8_domain: bool
    int16_pays: bool
    calls: int

class CpuRegisters(TypedDict):
    """What CPUID and XGETBV say, and whether the system gave this process tiles."""

    leaf1_ecx: int
    leaf7_ebx: int
    leaf7_ecx: int
    leaf7_edx: int
    leaf71_eax: int
    xcr0: int
    tiles: bool
    vendor: str

def kernels() -> list[KernelInfo]: ...
def current_isa() -> str: ...
def force_isa(name: str) -> None: ...
def cpu_registers() -> CpuRegisters: ...
def tiles_refused() -> bool: ...
def allowed_cpus() -> int: ...
def topology(
    root: str = "/", cpus: Sequence[int] | None = None
) -> tuple[int, list[tuple[int, list[int], int, int]]]: ...
def cgroups(controller: str, root: str = "/") -> list[tuple[str, bool]]: ...
def threads() -> int: ...
def set_threads(n: int) -> None: ...
def use_openmp(parallel: int, max_threads: int) -> None: ...
def in_openmp() -> bool: ...
def set_nodes(n: int) -> None: ...
def check_nodes(n: int) -> None: ...
def available_nodes() -> int: ...
def nodes() -> int: ...
def share(
    root: str, cpus: Sequence[int], nodes: int, threads: int, slices: int
) -> list[tuple[int, list[int], int, int, int]]: ...
def refusals() -> list[str]: ...
def recycled_bytes() -> int: ...
def release_recycled() -> None: ...

class Arena(Buffer):
    """Private memory that does not follow a fork, in huge pages where there are."""

    def __init__(self, nbytes: int) -> None: ...

class RecycledBuffer(Buffer):
    """Memory that goes to the next one of its size when it is freed."""

    def __init__(self, nbytes: int) -> None: ...

class Batch:
    """x [tokens, hidden] bf16, index [tokens, top_k] int64, weight [tokens, top_k] fp32; mine
    [experts] uint8: the experts to compute; parts: (tokens, dropout seed) of every process."""

    def __init__(
        self,
        *,
        tokens: int,
        top_k: int,
        x: int,
        index: int,
        weight: int,
        mine: int = 0,
        parts: Sequence[tuple[int, int]] = (),
    ) -> None: ...

class Lora:
    """By projection (gate, up, down): a [E, r, in], b [E, out, r] of one dtype; r 0: no adapter."""

    def __init__(
        self,
        *,
        a: Sequence[int],
        b: Sequence[int],
        r: Sequence[int],
        scaling: Sequence[float],
        dtype: int,
        dropout: float,
        seed: int,
    ) -> None: ...

class Output:
    """[tokens, hidden], added up in fp32; rounded: to bf16 once, at the end."""

    def __init__(self, address: int, rounded: bool) -> None: ...

class Grads:
    """dw [tokens, top_k], da[p] and db[p] shaped as the factors, all fp32."""

    def __init__(self, *, dx: Output, dw: int, da: Sequence[int], db: Sequence[int]) -> None: ...

class Codes:
    """A matrix [n, k] in published codes: of each part an address and its strides in elements."""

    def __init__(
        self,
        *,
        codes: tuple[int, int, int],
        scales: tuple[int, int, int],
        zeros: tuple[int, int, int],
        factor: tuple[int, int],
    ) -> None: ...

class Layer:
    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        format: str,
        group: int,
        act: int,
        slices: int = 1,
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def max_slices(self) -> int: ...
    @property
    def int16_pays(self) -> bool: ...
    def attach(self, buffer: Buffer) -> None: ...
    def bind_slices(self) -> None: ...
    def pack(self, expert: int, projection: int, source: int, dtype: int, ld: int) -> bool: ...
    def pack_codes(self, expert: int, projection: int, codes: Codes) -> bool: ...
    def unpack(self, expert: int, projection: int, out: int) -> None: ...
    def forward(
        self, batch: Batch, lora: Lora | None, compute: int, out: Output, saved: int
    ) -> None: ...
    def backward(
        self, batch: Batch, lora: Lora | None, compute: int, dy: int, saved: int, grads: Grads
    ) -> None: ...

class testing:  # noqa: N801 - a submodule
    """Switches that only tests use."""

    @staticmethod
    def use_cpu(registers: CpuRegisters | None) -> None: ...
    @staticmethod
    def set_threads(n: int) -> None: ...
    @staticmethod
    def pretend_nodes(n: int) -> None: ...
    @staticmethod
    def node_workers() -> list[tuple[int, int, list[list[int]]]]: ...
    @staticmethod
    def refuse_call(name: str, error: int) -> None: ...
    @staticmethod
    def delay_tasks(microseconds: int) -> None: ...
    @staticmethod
    def fail_tasks(worker: int) -> None: ...
    @staticmethod
    def workers_seen() -> int: ...
