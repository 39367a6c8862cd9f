"""PEFT adapters for inference: read, judged, put on a loaded model, merged into a checkpoint.
Nothing here imports peft.

    load_adapter(model, "demo/adapter", "tuned")
    with adapter(model, "tuned"):
        model.generate(...)
    with adapter(model, None): ...            # the base model
"""

from kt_core.adapters.attach import adapter, adapters, load_adapter, unload_adapter
from kt_core.adapters.merging import merge
from kt_core.adapters.peft_format import AdapterData, read_adapter

__all__ = [
    "AdapterData",
    "adapter",
    "adapters",
    "load_adapter",
    "merge",
    "read_adapter",
    "unload_adapter",
]
