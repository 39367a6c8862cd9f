"""One rank of a LLaMA-Factory run under FSDP2 on CPU; see test_sft_fsdp2.py. Argument: a YAML."""

from __future__ import annotations

import cpu_fsdp_shim
from llamafactory.train.tuner import run_exp
from torch.distributed.tensor import DTensor
from transformers import Trainer

from kt_sft import llamafactory

if __name__ == "__main__":
    cpu_fsdp_shim.apply()
    # Users are stopped here, because without the shim accelerate would run DDP.
    llamafactory.uses_fsdp = lambda training_args: False
    step = Trainer.training_step

    def training_step(self, model, *args, **kw):
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return step(self, model, *args, **kw)

    Trainer.training_step = training_step
    run_exp()
