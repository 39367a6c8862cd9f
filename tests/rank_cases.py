"""What the ranks of a RankGroup run. First argument: a pytest.MonkeyPatch that is undone after the
case.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import zlib
from pathlib import Path
from types import SimpleNamespace

import sft_cases as cases
import torch
import transformers
from torch import distributed

from kt_core import _kt, runtime
from kt_core.experts import Experts
from kt_core.loading import checkpoint
from kt_core.loading import memory as kt_memory
from kt_core.module import KTExpertsLinear
from kt_sft.op import row_counts
from kt_sft.ranks import host
from kt_sft.report import step_log
from kt_sft.run import budget


def place(patch, hosts: list[str] | None) -> int:
    """Puts every rank on a host (None: all on this one); returns this rank's number."""
    rank = distributed.get_rank()
    if hosts is not None:
        patch.setattr(host, "host_identity", lambda: hosts[rank])
    return rank


def experts_of(model) -> list:
    """The packed experts of a model's layers."""
    return [m.experts for m in model.modules() if isinstance(m, KTExpertsLinear)]


def pss() -> int:
    """This process's proportional share of the memory it maps, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss in smaps_rollup")


def load(patch, path, hosts=None, **config):
    """Loads, computes, and tells who packed, what is mapped and what came out."""
    place(patch, hosts)
    packed: list[str] = []
    fill = checkpoint.fill
    patch.setattr(
        checkpoint, "fill", lambda layer, *rest: (packed.append(layer.name), fill(layer, *rest))
    )
    before = _shared_memory()  # an earlier case's model may still be held by some library
    model = cases.load(path, **config)
    layers = experts_of(model)
    return {
        "packed": len(packed),
        "read only": all(layer.packed().readonly for layer in layers),
        "shared mappings": len(_shared_memory() - before),
        "threads": runtime.threads(),
        "slices": [layer.slices for layer in layers],
        "logits": cases.logits(model, cases.token_ids()),
    }


def log_line(patch, hosts=None):
    """The numbers of a log line of a rank that trained on 10 tokens more than the one before it,
    and how many ranks its machine has.
    """
    rank = place(patch, hosts)
    layers = [Experts(2, 16, 8, format="bf16") for _ in range(2)]
    modules = (KTExpertsLinear(x, layer_index=i) for i, x in enumerate(layers))
    callback = step_log.StepLog()
    args, state = (
        SimpleNamespace(gradient_accumulation_steps=1),
        SimpleNamespace(is_world_process_zero=rank == 0),
    )
    callback.on_train_begin(args, state, None, model=torch.nn.ModuleList(modules))
    callback._tokens.tokens += 10 * (rank + 1)
    if rank == 0:  # the others have no rows at all, and run the same collectives
        row_counts.count_rows(layers[0], torch.tensor([[0, 1], [1, 1]]))
    row_counts.count_rows(layers[1], torch.tensor([[0, 1]]))
    return callback.measure(), budget.ranks_of_this_host()


def _shared_memory() -> set[str]:
    """Inodes of the memory shared with other ranks that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:kt-experts" in line}


def refused(patch, path, hosts=None, available=None, fails_on=None, killed=False, **config):
    """The sentence with which this rank refuses to load, and the bytes it would have needed.

    available: what the machine has. fails_on: the rank that meets a damaged checkpoint, or
    (killed) a kill -9 there.
    """
    rank = place(patch, hosts)
    needs = []
    check = kt_memory.check
    patch.setattr(kt_memory, "check", lambda need, *rest: (needs.append(need), check(need, *rest)))
    if available is not None:
        limits = [kt_memory.Limit("the machine's MemAvailable", available)]
        patch.setattr(kt_memory, "limits", lambda: limits)
    if rank == fails_on:
        fill = checkpoint.fill

        def damaged(layer, *rest):
            if ".1." in layer.name:
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError(f"{layer.name} is damaged")
            fill(layer, *rest)

        patch.setattr(checkpoint, "fill", damaged)
    sentence = None
    try:
        cases.load(path, **config)
    except (ValueError, OSError, MemoryError, host.LostRankError) as error:
        sentence = f"{type(error).__name__}: {error}"
    return sentence, needs[0] if needs else None


def memory(patch, path, without, **config):
    """PSS of the model with experts and of the one without, after a forward, and packed bytes."""
    ids = cases.token_ids()
    found = {}
    for name in ("first", "without", "with"):  # the first warms up allocators and imports
        if name == "with":
            model = cases.load(path, **config)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(without, dtype=torch.float32)
        cases.logits(model, ids)
        for layer in experts_of(model):
            zlib.crc32(layer.packed())  # every page of it is used
        distributed.barrier()
        found[name] = pss()
        distributed.barrier()
        size = sum(e.nbytes for e in experts_of(model))
        del model
    return found["with"], found["without"], size


def load_on_two_nodes(patch, path, packed_dir):
    """Loads with this machine's node counting twice, each rank with a thread on both."""
    patch.setattr(host, "share_of_cpus", lambda me, ranks: runtime.allowed_cpus())
    _kt.testing.pretend_nodes(2)
    try:
        answer = load(patch, path, packed_dir=packed_dir, numa_nodes=2)
        return answer | {"nodes": runtime.numa_nodes()}
    finally:
        _kt.set_nodes(1)
        _kt.testing.pretend_nodes(0)
