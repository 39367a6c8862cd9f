"""Runs that can be interrupted: checkpoints that are whole or absent, and signals that save one.

The functions stand in the place of methods of transformers' Trainer (hooks.py) and act on runs
that have a `SafeStop` among their callbacks.

A checkpoint is written below `.kt-saving` and renamed when it is complete and on the disk, so a
process that is killed or a disk that is full never leaves half of one. SIGTERM and SIGINT (Ctrl-C)
save the state after the last finished optimizer step and end the run with exit code 128 + signal:
ranks stop together, between two micro-batches; a process that is alone stops between two layers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from kt_core import atomic, patches
from kt_sft.lora.adapter_io import NotWrittenError
from kt_sft.op import position
from kt_sft.ranks.collective import joined, over_ranks

log = logging.getLogger("kt")
STAGING = ".kt-saving"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Launchers pass a terminal's Ctrl-C on to ranks that may have got it already.
_ECHO_SECONDS = 2.0


class SafeStop(TrainerCallback):
    """Added by the LLaMA-Factory seam; may be given to any transformers Trainer of a model with CPU
    experts. While training runs, signals are answered as the module text says; a second signal
    ends the process at once.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.leaving = False
        self.saved = 0  # the step of this run's last whole checkpoint, also one it started from
        self._at = 0.0
        self._previous: dict[int, Any] = {}
        self._random: dict[str, Any] = {}
        self._process = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Takes over the signals (main thread only: elsewhere Python cannot)."""
        self.signal, self._process = 0, os.getpid()
        self.saved = state.global_step
        self.remember()
        try:
            self._previous = {s: signal.signal(s, self._receive) for s in _SIGNALS}
        except ValueError:
            log.warning("kt: training runs beside the main thread; signals will not save it")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Gives the signals back; one that came too late for a checkpoint ends the run now."""
        position.stop_here(False)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        if self.signal and not self.leaving:
            os.kill(os.getpid(), self.signal)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a data loader's worker, needed until the end
            return
        if self.signal:
            if time.monotonic() - self._at < _ECHO_SECONDS:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal, self._at = number, time.monotonic()
        position.stop_here(not _several_ranks())
        name = signal.Signals(number).name
        # not print: the signal may have interrupted one
        os.write(2, f"kt: {name}: saving a checkpoint, then ending; once more ends now\n".encode())

    def remember(self) -> None:
        """Notes the random generators, as a checkpoint of this moment has them."""
        self._random = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.random.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def restore(self) -> None:
        """Puts the random generators back to what `remember` noted."""
        random.setstate(self._random["python"])
        np.random.set_state(self._random["numpy"])
        torch.random.set_rng_state(self._random["cpu"])
        if self._random["cuda"]:
            torch.cuda.set_rng_state_all(self._random["cuda"])


def _several_ranks() -> bool:
    return joined() and distributed.get_world_size() > 1


def training_step(
    original: Callable[..., Tensor], trainer: Any, model: Any, *args: Any, **kw: Any
) -> Tensor:
    """Trainer.training_step: one micro-batch; before it, ranks agree on whether to go on."""
    stop = _stop_of(trainer)
    if stop is None:
        return original(trainer, model, *args, **kw)
    _leave_if_asked(trainer, stop)
    try:
        return original(trainer, model, *args, **kw)
    except position.StopRequestedError:
        _leave(trainer, stop, stop.signal)


def after_step(original: Callable[..., None], trainer: Any, *args: Any, **kw: Any) -> None:
    """Trainer._maybe_log_save_evaluate, which follows every optimizer step."""
    stop = _stop_of(trainer)
    if stop is None:
        original(trainer, *args, **kw)
        return
    if _agreed(stop):  # no time for an evaluation
        trainer.control.should_evaluate = False
    position.stop_here(False)  # the step is done: nothing here may be given up halfway
    with contextlib.suppress(position.StopRequestedError):  # in an evaluation
        original(trainer, *args, **kw)
    stop.remember()
    _leave_if_asked(trainer, stop)


def _stop_of(trainer: Any) -> SafeStop | None:
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, SafeStop):
            return callback
    return None


def _agreed(stop: SafeStop) -> int:
    """The signal that any rank has received, 0 for none. A collective."""
    return int(over_ranks(torch.tensor([stop.signal]), "max").item())


def _leave_if_asked(trainer: Any, stop: SafeStop) -> None:
    if asked := _agreed(stop):
        _leave(trainer, stop, asked)


def _leave(trainer: Any, stop: SafeStop, number: int) -> NoReturn:
    """Saves the state after the last finished optimizer step, ends the run."""
    position.stop_here(False)
    stop.leaving = True
    state, args = trainer.state, trainer.args
    folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    if state.global_step != stop.saved:
        stop.restore()
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        trainer.callback_handler.on_save(args, state, trainer.control)
    elif not folder.is_dir() and args.resume_from_checkpoint:
        folder = Path(args.resume_from_checkpoint)
    what = "no step was finished, so there is nothing to save"
    if state.global_step > 0:
        what = f"saved {folder}; go on with resume_from_checkpoint: {folder}"
    trainer.callback_handler.on_train_end(args, state, trainer.control)
    if state.is_world_process_zero:
        print(f"kt: ended by {signal.Signals(number).name}: {what}", flush=True)
    if joined():
        distributed.destroy_process_group()
    raise SystemExit(128 + number)


# -------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(
    original: Callable[..., None], trainer: Any, model: Any, trial: Any, **kw: Any
) -> None:
    """Trainer._save_checkpoint: under its final name when it is complete.

    Raises OSError naming the last whole checkpoint where the disk is full or fails.
    """
    stop = _stop_of(trainer)
    if stop is None:
        original(trainer, model, trial, **kw)
        return
    args, state = trainer.args, trainer.state
    run = Path(trainer._get_output_dir(trial=trial))
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    staging = run / STAGING
    tidies = args.local_process_index == 0  # one per machine: there may be no common disk
    if tidies:
        shutil.rmtree(staging, ignore_errors=True)
    _wait()
    mark = staging / "seen-by-rank-0"
    patches.give(
        *(trainer, "_get_output_dir", lambda *args, **kw: os.fspath(staging)),
        of="a Trainer that saves",
        by=__name__,
        why="a checkpoint gets its name when it is whole",
    )
    try:
        if state.is_world_process_zero:
            staging.mkdir(parents=True, exist_ok=True)
            mark.touch()
        original(trainer, model, trial, **kw)
        _name_best(trainer, run, staging / name)
        _wait()
        # Of machines that share a disk the first alone finishes what all have written.
        tidies = tidies and (state.is_world_process_zero or not mark.exists())
        if tidies:  # before an older checkpoint is deleted
            atomic.sync(staging / name)
        _wait()  # all have looked for the mark, which goes with the staging folder
    except Exception as error:
        if tidies:
            shutil.rmtree(staging, ignore_errors=True)
        if not _failed_to_write(error):
            raise
        raise OSError(
            f"{name} could not be written to {run} ({error}); free some space and go on with "
            f"{_last_whole(run)}"
        ) from error
    finally:
        del trainer._get_output_dir
    if tidies:
        _put_in_place(staging / name, run / name)
        shutil.rmtree(staging, ignore_errors=True)
    _wait()
    stop.saved = state.global_step
    if args.should_save:
        rotate_checkpoints(
            output_dir=os.fspath(run),
            save_total_limit=args.save_total_limit,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=True,
        )


def save_model(
    original: Callable[..., None],
    trainer: Any,
    output_dir: str | None = None,
    _internal_call: bool = False,
    *args: Any,
    **kw: Any,
) -> None:
    """Trainer.save_model, which under FSDP with SHARDED_STATE_DICT would save no adapter at all."""
    if (
        _stop_of(trainer) is None
        or not trainer.is_fsdp_enabled
        or "FULL_STATE_DICT" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
    ):
        original(trainer, output_dir, _internal_call, *args, **kw)
        return
    folder = output_dir or trainer.args.output_dir
    model = trainer.accelerator.unwrap_model(trainer.model)
    model.save_pretrained(folder, is_main_process=trainer.args.should_save)  # gathers: a collective
    if trainer.args.should_save:
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(folder)
        torch.save(trainer.args, Path(folder) / TRAINING_ARGS_NAME)


def _name_best(trainer: Any, run: Path, folder: Path) -> None:
    """Makes the state say where the best checkpoint will be, which may be the one being written."""
    state = trainer.state
    if not state.best_global_step:
        return
    best = run / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if best.name == folder.name or best.is_dir():
        state.best_model_checkpoint = os.fspath(best)
    if trainer.args.should_save:
        state.save_to_json(os.fspath(folder / "trainer_state.json"))


def _put_in_place(new: Path, final: Path) -> None:
    """Renames; what an overwritten run left under that name goes with the staging folder."""
    old = new.with_name("old")
    if final.exists():
        atomic.rename(final, old)
    atomic.rename(new, final)


def _failed_to_write(error: Exception) -> bool:
    if isinstance(error, OSError | SafetensorError | NotWrittenError):
        return True
    # torch.save has no class of its own for them
    return isinstance(error, RuntimeError) and (
        "PytorchStreamWriter" in str(error) or "unexpected pos" in str(error)
    )


def _last_whole(run: Path) -> str:
    found = [p for p in run.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if p.name.split("-")[-1].isdigit()]
    if not found:
        return "the start: no earlier checkpoint was saved"
    return f"resume_from_checkpoint: {max(found, key=lambda p: int(p.name.split('-')[-1]))}"


def _wait() -> None:
    if joined():
        distributed.barrier()


@functools.cache  # torch takes it back from nobody
def read_on_numbered_cpus() -> None:
    """Lets torch.load put tensors on "cpu:0", where the Trainer wants the optimizer of a checkpoint
    on several CPU ranks, and which torch refuses to understand. Nothing else reads differently.
    """
    torch.serialization.register_package(100, _no_tag, _on_numbered_cpu)


def _no_tag(storage: Any) -> None:
    return None


def _on_numbered_cpu(storage: Any, location: str) -> Any:
    return storage if location.startswith("cpu:") else None


def check_resumable(checkpoint: str | Path, world_size: int) -> None:
    """Raises ValueError if a run of `world_size` processes cannot continue `checkpoint` exactly."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise ValueError(
            f"resume_from_checkpoint={checkpoint} is no directory; give a checkpoint-N folder of "
            "the run"
        )
    if (folder / "rng_state.pth").exists():
        made_by = 1
    else:
        made_by = len(list(folder.glob("rng_state_*.pth")))
    if made_by == 0:
        raise ValueError(
            f"resume_from_checkpoint={checkpoint} holds no optimizer and random state, so the run "
            "cannot be continued; set adapter_name_or_path to it instead, to start a new run from "
            "its adapter"
        )
    if made_by != world_size:
        raise ValueError(
            f"resume_from_checkpoint={checkpoint} was saved by {made_by} processes, but this run "
            f"has {world_size}: the order of the data and the random state cannot be continued; "
            f"run {made_by} processes, or set adapter_name_or_path to it instead, to start a new "
            "run from its adapter"
        )
