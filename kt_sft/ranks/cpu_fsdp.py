"""FSDP2 on ranks that compute on the CPU (gloo), for models with experts in CPU memory.

accelerate selects FSDP for accelerator devices only; given an FSDP configuration on CPU ranks it
runs DDP without saying so, although torch's fully_shard works there. `state_init` stands in the
place of AcceleratorState.__init__ and sets what accelerate would have set on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType

_wanted = False


def want(wanted: bool) -> None:
    """Whether runs of this process that begin from now on are to get the FSDP2 that they ask for on
    CPUs; otherwise accelerate does what it does without us.
    """
    global _wanted
    _wanted = wanted


def state_init(original: Callable[..., None], state: Any, **kw: Any) -> None:
    """AcceleratorState.__init__."""
    original(state, **kw)
    plugin = kw.get("fsdp_plugin")
    on_cpu_ranks = state.distributed_type == DistributedType.MULTI_CPU
    if not (_wanted and on_cpu_ranks and plugin is not None and plugin.fsdp_version == 2):
        return
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if state._mixed_precision != "no":
        plugin.set_mixed_precision(state._mixed_precision)
    state.fsdp_plugin = plugin
