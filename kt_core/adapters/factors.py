"""The factors of one LoRA."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """One LoRA: a [r, in], b [out, r] of a Linear, or a [E, r, in], b [E, out, r] of a projection
    of the experts.
    """

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """r, from the tensors."""
        return self.a.shape[-2]

    @property
    def alpha(self) -> float:
        """The lora_alpha that gives `scaling` without rslora."""
        return self.scaling * self.rank

    def delta(self) -> Tensor:
        """scaling * B @ A in fp32, [out, in] or [E, out, in]."""
        return self.scaling * (self.b.float() @ self.a.float())
