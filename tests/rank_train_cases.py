"""Training on the ranks of a RankGroup: LLaMA-Factory's runs, and what FSDP2 and DDP must prove.

First argument: a pytest.MonkeyPatch that is undone after the case.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import lf_cases
import sft_cases as cases
import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import PeftModel
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kt_core import atomic
from kt_core.module import KTExpertsLinear
from kt_sft import hooks
from kt_sft.report.stats import check_gradients, count_trainable

# What `accelerate launch --config_file accelerate_configs/fsdp2.yaml` puts into the environment.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
}


class Act(transformers.TrainerCallback):
    """Sends this process a signal at an event when `step` steps are done, once."""

    def __init__(self, event: str, step: int, number: int) -> None:
        self.step, self.number = step, number
        setattr(self, event, self._act)

    def _act(self, args, state, control, **kw):
        if state.global_step == self.step:
            self.step = -1
            os.kill(os.getpid(), self.number)


def train(patch, args, engine="kernels", fsdp=None, zero=None, act=None, common_disk=False):
    """A run of LLaMA-Factory: its losses, and the exit code it asked for.

    fsdp: variables of accelerate's launcher for FSDP2, on top of FSDP2. zero: stage of DeepSpeed's
    ZeRO. act: (rank, event, step, signal). common_disk: every rank is the first of a machine of its
    own, all write to one disk, and the second one's writing takes long.
    """
    from llamafactory.train.tuner import run_exp

    rank = distributed.get_rank()
    cases.use(engine, patch)
    hooks.install()
    dtypes = set()
    if fsdp is not None:
        os.environ.update(FSDP2 | fsdp)
        _watch_sharding(patch, dtypes)
    if common_disk:
        patch.setattr(transformers.TrainingArguments, "local_process_index", 0)
        sync = atomic.sync
        patch.setattr(atomic, "sync", lambda path: (time.sleep(rank), sync(path)))
    if zero is not None:
        _use_deepspeed(patch, zero)
    callbacks = [Act(*act[1:])] if act is not None and act[0] == rank else []
    code = 0
    try:
        run_exp(dict(args), callbacks)
    except SystemExit as ended:
        code = ended.code
    losses = lf_cases.losses(args["output_dir"]) if rank == 0 and code == 0 else []
    return {"losses": losses, "code": code, "dtypes": dtypes}


def _use_deepspeed(patch, stage: int) -> None:
    """What accelerate's launcher sets for accelerate_configs/deepspeed_zero2.yaml or another stage,
    and a look at every step that DeepSpeed runs it."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(stage == 3).lower(),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
        "ACCELERATE_GRADIENT_CLIPPING": "auto",
    }
    import deepspeed

    # Both are of the last case's process group.
    patch.setattr(deepspeed.comm.comm, "cdb", None)
    patch.setattr(deepspeed.utils.groups, "_WORLD_GROUP", None)
    step = transformers.Trainer.training_step

    def training_step(self, model, *args, **kw):
        assert isinstance(model, deepspeed.DeepSpeedEngine)
        assert model.zero_optimization_stage() == stage and distributed.get_world_size() > 1
        assert self.args.world_size == distributed.get_world_size()
        return step(self, model, *args, **kw)

    patch.setattr(transformers.Trainer, "training_step", training_step)


def _watch_sharding(patch, dtypes: set) -> None:
    """A look at every step that accelerate's FSDP2 is there."""
    step = transformers.Trainer.training_step

    def training_step(self, model, *args, **kw):
        assert all(isinstance(p, DTensor) for p in model.parameters())
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert trained and all("lora_" in name for name in trained)
        dtypes.update((str(p.dtype), p.requires_grad) for p in model.parameters())
        return step(self, model, *args, **kw)

    patch.setattr(transformers.Trainer, "training_step", training_step)


# ----------------------------------------------------------------------------------------- by hand


def _build(model: str, adapter: str) -> PeftModel:
    """The model with the saved adapter, trainable, on this rank alone."""
    return PeftModel.from_pretrained(cases.load(Path(model)), adapter, is_trainable=True)


def _loss(model, ids: torch.Tensor) -> torch.Tensor:
    """The language modelling loss."""
    return model(input_ids=ids, labels=ids).loss


def _sharded(patch, model, efficient=False, **options):
    """accelerate's FSDP2 around a model and its AdamW: (accelerator, model, optimizer).

    efficient: the ranks get what the first one has (fsdp_cpu_ram_efficient_loading)."""
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
        reshard_after_forward=True,
        state_dict_type="FULL_STATE_DICT",
        cpu_ram_efficient_loading=efficient,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=sharding, **options)
    optimizer = torch.optim.AdamW(list(cases.trained(model).values()), lr=1e-2)
    sharding.set_auto_wrap_policy(model)
    return accelerator, *accelerator.prepare(model, optimizer)


def fsdp_against_one_process(patch, engine, path, adapter, out):
    """Gradients, disabled adapter, saving: all ranks against one process."""
    cases.use(engine, patch)
    size = distributed.get_world_size()
    ids = cases.token_ids(size, 24)
    rank = distributed.get_rank()
    alone = _build(path, adapter).train()
    (sum(_loss(alone, row[None]) for row in ids) / size).backward()
    want = {n: p.grad.clone() for n, p in cases.trained(alone).items()}

    accelerator, model, optimizer = _sharded(patch, _build(path, adapter).train())
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
    # the same batch on all ranks: halving a sum of two equal numbers is exact
    alone.zero_grad()
    _loss(alone, ids).backward()
    accelerator.backward(_loss(model, ids))
    found["same batch"] = max(
        float((p.grad.full_tensor() - cases.trained(alone)[n].grad).abs().max())
        for n, p in trained.items()
    )
    optimizer.zero_grad()
    accelerator.backward(_loss(model, ids[rank : rank + 1]))
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

    # rank-specific values, saved from the gathered state dict and by all ranks without one
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
    distributed.barrier()
    return found, full, tuned


def buffers_of_every_kind(patch, path):
    """What ranks get of persistent buffers that the first has: (values and dtypes by name, names
    that the state dict lacks, whether two forwards agree)."""
    model = cases.adapted(cases.load(Path(path))).train()
    rank, ids = distributed.get_rank(), cases.token_ids(2, 24)
    inner = model.get_base_model()
    kinds = {
        "fp32": torch.tensor([0.1, -0.2, 1e-30]),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([[True, False], [False, True]]),
        "narrow": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "nothing": torch.empty(0),
    }
    owners = [inner, inner.model.layers[0], inner.model.layers[1].mlp.gate]
    for owner in owners:
        for name, value in kinds.items():
            # in another dtype where nothing was read, as transformers may have it
            held = value.clone() if rank == 0 else torch.zeros_like(value, dtype=torch.float16)
            owner.register_buffer(name, held)
        owner.register_buffer("own", torch.full([2], float(rank)), persistent=False)
    before = float(_loss(model, ids))
    accelerator, model, _ = _sharded(patch, model, efficient=True)
    after = float(_loss(model, ids))
    state = accelerator.get_state_dict(model)
    got = {n: b for n, b in model.named_buffers() if n.rpartition(".")[2] in {*kinds, "own"}}
    wrong = [
        name
        for name, b in got.items()
        for want in [kinds.get(name.rpartition(".")[2], torch.full([2], float(rank)))]
        if b.dtype != want.dtype or not torch.equal(b, want)
    ]
    kept = [n for n in got if n in state]
    return {
        "wrong": wrong,
        "buffers": len(got),
        "in the state dict": len(kept) if rank == 0 else len(owners) * len(kinds),
        "not persistent": sum(n.endswith("own") for n in kept),
        "loss": after - before,
    }


def unlike_routing(patch, path, adapter, wrapper, empty):
    """Two optimizer steps in which the ranks use different experts; with `empty`, no token of
    rank 0 reaches an expert or counts in the loss.

    Returns seconds, the losses and gradient norms, and the experts that this rank used.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    ids = cases.token_ids(size, 24)
    counts = 0.0 if empty and rank == 0 else 1.0
    model = _build(path, adapter).train()
    used = []
    for module in model.modules():
        if isinstance(module, KTExpertsLinear):
            _only_experts(patch, module, range(rank, module.num_experts, size), counts, used)
    if wrapper == "fsdp2":
        _, model, optimizer = _sharded(patch, model)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=False)
        optimizer = torch.optim.AdamW(list(cases.trained(model).values()), lr=1e-2)
    started, numbers = time.monotonic(), []
    for _ in range(2):
        logits = model(input_ids=ids[rank : rank + 1]).logits
        loss = -counts * logits.log_softmax(-1)[..., 3].sum() / ids.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        distributed.all_reduce(whole)
        numbers.append((float(whole), float(norm)))
    return time.monotonic() - started, numbers, sorted(set(used))


def _only_experts(patch, module, own, share, used):
    """Sends this rank's tokens (share 0: none of them) to its own experts only."""
    run, own = module.runner, torch.tensor(list(own))

    def runner(experts, x, index, weights, lora):
        n = int(share * len(x))
        mine = own[index[:n] % len(own)]
        used.extend(mine.flatten().tolist())
        out = run(experts, x[:n], mine, weights[:n], lora)
        return torch.cat([out, torch.zeros_like(x[n:])])

    patch.setattr(module, "runner", runner)
