"""What a log line of a use_kt run has beside the Trainer's loss, learning rate and gradient norm.

`step_log.py` measures it and puts it into the Trainer's own log entry, from where it reaches
trainer_state.json and every `report_to`. LLaMA-Factory's LogCallback writes a fixed set of keys
into trainer_log.jsonl; `with_our_keys` adds these. Imports nothing heavy: it runs in stock runs
too.
"""

from __future__ import annotations

from typing import Any

KEYS = {
    "tokens_per_second": "tokens trained on per second since the last entry, all ranks together",
    "experts_forward_s": "seconds in the experts' forward (mean of the ranks); a GPU waits then",
    "experts_backward_s": "seconds in the experts' backward (mean of the ranks); a GPU waits then",
    "rest_s": "all other seconds since the last entry; the experts' threads are idle then",
    "rss_gib": "memory of the process in GiB (largest of the ranks)",
    "expert_tokens_min": "fewest rows of any expert of any layer",
    "expert_tokens_median": "median of the rows over experts and layers",
    "expert_tokens_max": "most rows of any expert of any layer",
    "expert_rows_per_pass": "mean rows of an expert each time its weights are read for backward",
    "experts_gathered": "part of the backward passes that a machine's ranks computed together",
    "expert_imbalance": "rows of a layer's busiest expert / mean of that layer, in the worst layer",
}


def with_our_keys(base: type) -> type:
    """LLaMA-Factory's LogCallback, writing KEYS and grad_norm too where the log entry has them."""

    class LogCallback(base):
        def __init__(self, *args: Any, **kw: Any) -> None:
            super().__init__(*args, **kw)
            # By step: lines are written by a thread, which may be behind.
            self._extra: dict[int, dict[str, float]] = {}

        def on_log(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            entry = state.log_history[-1]
            if all(key in entry for key in KEYS):
                keys = [key for key in ("grad_norm", *KEYS) if key in entry]
                self._extra[state.global_step] = {key: entry[key] for key in keys}
            super().on_log(args, state, control, **kw)

        def _write_log(self, output_dir: str, logs: dict[str, Any]) -> None:
            extra = self._extra.pop(logs["current_steps"], {}) if "loss" in logs else {}
            super()._write_log(output_dir, logs | extra)

    LogCallback.__module__, LogCallback.__qualname__ = base.__module__, base.__qualname__
    return LogCallback
