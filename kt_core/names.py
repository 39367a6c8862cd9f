"""What the projections of routed experts are called: by us, in checkpoints and in adapters."""

from __future__ import annotations

PROJECTIONS = ("gate", "up", "down")  # the kernels count them in this order

# Leaf names of a projection where every expert has tensors of its own: in most families, and in
# Mixtral and its kin.
PROJECTION_KEYS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_KEYS = {"gate": "w1", "up": "w3", "down": "w2"}
PROJECTION_OF = {leaf: p for p, leaf in [*PROJECTION_KEYS.items(), *MIXTRAL_KEYS.items()]}

# transformers' parameters that stack the matrices of all experts -> the projections that stand in
# their rows, in this order.
STACKED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def projection_names(projection: str) -> list[str]:
    """Leaf names that a projection has in the families."""
    return [PROJECTION_KEYS[projection], MIXTRAL_KEYS[projection]]
