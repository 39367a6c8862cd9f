"""One rank of the FSDP2 test (see test_sft_fsdp2.py); run by torchrun, writes what it finds as
JSON.

Arguments: engine, model directory, adapter directory, output directory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import cpu_fsdp_shim
import pytest
import sft_cases as cases
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import PeftModel
from torch.distributed.tensor import DTensor

from kt_core.module import KTExpertsLinear
from kt_sft.callback import check_gradients, count_trainable


def build(model: str, adapter: str) -> PeftModel:
    """The model with the saved adapter, trainable, on this rank alone."""
    return PeftModel.from_pretrained(cases.load(Path(model)), adapter, is_trainable=True)


def loss(model, ids: torch.Tensor) -> torch.Tensor:
    """The language modelling loss."""
    return model(input_ids=ids, labels=ids).loss


def main(engine: str, path: str, adapter: str, out: str) -> None:
    """Gradients, disabled adapter, saving: 2 ranks against one process."""
    cases.use(engine, pytest.MonkeyPatch())
    ids = cases.token_ids(2, 24)
    cpu_fsdp_shim.apply()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
        reshard_after_forward=True,
        state_dict_type="FULL_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    rank = accelerator.process_index
    alone = build(path, adapter).train()
    (sum(loss(alone, row[None]) for row in ids) / 2).backward()
    want = {n: p.grad.clone() for n, p in cases.trained(alone).items()}

    model = build(path, adapter).train()
    optimizer = torch.optim.AdamW(list(cases.trained(model).values()), lr=1e-2)
    plugin.set_auto_wrap_policy(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    trained = cases.trained(model)
    found = {
        "fsdp2": accelerator.is_fsdp2,
        "dtensors": all(isinstance(p, DTensor) for p in model.parameters()),
        "trained": sorted(trained) == sorted(want),
        "counts": count_trainable(model) == count_trainable(alone),
        "optimizer": sum(p.numel() for g in optimizer.param_groups for p in g["params"])
        == sum(p.numel() for p in want.values()),
        "base experts in tree": sum("gate_up_proj" in n for n, _ in model.named_parameters()),
        "expert modules": sum(isinstance(m, KTExpertsLinear) for m in model.modules()),
    }
    # the same batch on both ranks: halving a sum of two equal numbers is exact
    alone.zero_grad()
    loss(alone, ids).backward()
    accelerator.backward(loss(model, ids))
    found["same batch"] = max(
        float((p.grad.full_tensor() - cases.trained(alone)[n].grad).abs().max())
        for n, p in trained.items()
    )
    optimizer.zero_grad()
    accelerator.backward(loss(model, ids[rank : rank + 1]))
    found["gradient error"] = max(
        float((p.grad.full_tensor() - want[n]).norm() / want[n].norm()) for n, p in trained.items()
    )
    check_gradients(model)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

    with torch.no_grad(), accelerator.unwrap_model(model).disable_adapter():
        base = model(input_ids=ids).logits
    with alone.disable_adapter():
        found["disabled"] = float((base - cases.logits(alone, ids)).abs().max())

    # F1: rank-specific values, saved from the gathered state dict and by all ranks without one
    with torch.no_grad():
        for number, (_, p) in enumerate(sorted(trained.items())):
            local = p.to_local()
            local.copy_(torch.arange(local.numel()).view_as(local) * 1e-3 + 10 * number + rank)
    full = {n: p.full_tensor() for n, p in trained.items()}
    state = accelerator.get_state_dict(model)
    inner = accelerator.unwrap_model(model)
    inner.save_pretrained(f"{out}/gathered", state_dict=state, is_main_process=rank == 0)
    inner.save_pretrained(f"{out}/by_all", is_main_process=rank == 0)
    with torch.no_grad():
        tuned = model(input_ids=ids).logits
    if rank == 0:
        torch.save((full, tuned), f"{out}/full.pt")
        Path(out, "found.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # All is done and written. Under load, interpreter exit with torch 2.13's gloo sometimes ends in
    # "terminate called without an active exception"; our pool has no threads here (KT_THREADS=1).
    sys.stdout.flush()
    os._exit(0)
