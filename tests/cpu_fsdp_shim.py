"""TEST ONLY: lets accelerate run FSDP2 on CPU ranks.

accelerate never selects FSDP for CPU processes and silently runs DDP instead (for users, use_kt
refuses such a run). To test accelerate's real FSDP2 paths on gloo, `apply()` sets the distributed
type that it would set on GPUs.
"""

from __future__ import annotations

from accelerate import state
from accelerate.utils import DistributedType


def apply(patch) -> None:
    """Patches AcceleratorState in this process, through a pytest.MonkeyPatch."""
    original = state.AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kw):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kw)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    patch.setattr(state.AcceleratorState, "__init__", init)
