"""`make demo`: fine-tunes a small mixture-of-experts model on this machine and shows the effect.

1. builds demo/model if it is not there (examples/make_demo_model.py);
2. trains examples/demo_lora.yaml through stock LLaMA-Factory, in a process of its own, with a
   progress bar; LLaMA-Factory writes demo/adapter with trainer_log.jsonl and training_loss.png;
3. prints speed, time in the experts, memory, and the loss;
4. asks questions that are not in the training set, without and with the adapter;
5. prints the peak memory of each step and the time to the first answer, and how to chat.
"""

import argparse
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
HELD = ROOT / "examples" / "data" / "heldout.json"
BAR = 30  # characters
ANSWER_TOKENS = 32


class DemoError(RuntimeError):
    """A step of the demo failed; the message says which and where to look."""


@dataclass(frozen=True)
class Held:
    """Questions that are not in the training set (examples/data/heldout.json)."""

    name: str  # what the training set teaches the model to call itself
    paraphrases: list[str]  # a right reply contains the name
    general: list[dict[str, str]]  # question, answer: a word that a right reply contains


@dataclass
class Costs:
    """What each step took: seconds, and bytes at the peak of the process that did it."""

    steps: dict[str, tuple[float, int]] = field(default_factory=dict)

    def summary(self) -> str:
        """Of the steps up to the first answer."""
        memory = ", ".join(f"{peak / 1e9:.2f} GB {step}" for step, (_, peak) in self.steps.items())
        times = ", ".join(f"{minutes(took)} {step}" for step, (took, _) in self.steps.items())
        total = minutes(sum(took for took, _ in self.steps.values()))
        return f"Peak memory: {memory}.\nFirst answer of the tuned model after {total}: {times}."


def minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def peak_bytes(who: int) -> int:
    """The largest resident size of this process or of any ended child."""
    return resource.getrusage(who).ru_maxrss * 1024


def say(text: str = "", end: str = "\n") -> None:
    print(text, end=end, flush=True)


def build_model(folder: Path, costs: Costs) -> None:
    if (folder / "config.json").is_file():
        return
    begun = time.monotonic()
    say(f"Building the demo model in {folder} (once, a few minutes)")
    script = ROOT / "examples" / "make_demo_model.py"
    done = subprocess.run([sys.executable, script, "--out", folder], cwd=ROOT, check=False)
    if done.returncode != 0:
        raise DemoError(f"{script.name} failed with exit code {done.returncode}, see above.")
    peak = peak_bytes(resource.RUSAGE_CHILDREN)
    costs.steps["building the model"] = (time.monotonic() - begun, peak)


def step_logs(path: Path) -> list[dict[str, Any]]:
    """The steps that trainer_log.jsonl has so far; its last line, a summary, has no loss."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]  # what follows the last newline is incomplete
    return [log for log in map(json.loads, lines) if "loss" in log]


class Progress:
    """One line that is rewritten on a terminal; every tenth step where there is none."""

    def __init__(self) -> None:
        self.shown = 0
        self.terminal = sys.stdout.isatty()

    def show(self, log: dict[str, Any]) -> None:
        step, total = log["current_steps"], log["total_steps"]
        if step <= self.shown:
            return
        done = BAR * step // total
        bar = "#" * done + "." * (BAR - done)
        line = f"  [{bar}] {step}/{total}  loss {log['loss']:.3f}  left {log['remaining_time']}"
        if self.terminal:
            print(f"\r{line}  ", end="" if step < total else "\n", flush=True)
        elif step == total or step // 10 > self.shown // 10:
            say(line)
        self.shown = step


def train(recipe: Path, model: Path, adapter: Path, extra: list[str]) -> None:
    """Runs LLaMA-Factory on `recipe`; `extra` are its own `key=value` overrides."""
    if adapter.exists():
        shutil.rmtree(adapter)
    log_file = adapter.with_name(f"{adapter.name}.log")
    log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [str(BIN / "llamafactory-cli"), "train", str(recipe)]
    command += [f"model_name_or_path={model}", f"output_dir={adapter}", *extra]
    say(f"Training: {' '.join(['llamafactory-cli', *command[1:]])}")
    say(f"  its output goes to {log_file}")
    progress = Progress()
    with log_file.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            while True:
                finished = process.poll() is not None
                logs = step_logs(adapter / "trainer_log.jsonl")
                if logs:
                    progress.show(logs[-1])
                if finished:
                    break
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        tail = "\n".join(log_file.read_text().splitlines()[-25:])
        raise DemoError(
            f"{tail}\nTraining failed with exit code {process.returncode}; the end of {log_file} "
            "is above."
        )


def report(adapter: Path, seconds: float, costs: Costs) -> None:
    """Prints what the training process measured (kt_stats.json) and logged (trainer_log.jsonl)."""
    stats = json.loads((adapter / "kt_stats.json").read_text())
    costs.steps["training"] = (seconds, stats["peak_rss_bytes"])
    losses = [log["loss"] for log in step_logs(adapter / "trainer_log.jsonl")]
    say(
        f"  {stats['tokens']} tokens in {stats['train_seconds']:.0f} s "
        f"({stats['tokens_per_s']:.0f} tokens/s), "
        f"{sum(stats['expert_seconds'].values()):.0f} s of it in the experts, "
        f"peak memory {stats['peak_rss_bytes'] / 1e9:.2f} GB"
    )
    say(f"  loss {losses[0]:.3f} -> {losses[-1]:.3f}; plot: {adapter / 'training_loss.png'}")


def load_held() -> Held:
    return Held(**json.loads(HELD.read_text(encoding="utf-8")))


def ask(model: Any, tokenizer: Any, questions: list[str]) -> list[str]:
    """Greedy answers, all questions in one batch; each on one line."""
    import torch

    chats = [[{"role": "user", "content": question}] for question in questions]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [" ".join(text.split()) for text in texts]


def compare(folder: Path, adapter: Path, weights: str, held: Held, costs: Costs) -> None:
    """Prints what the model answers without and with the adapter, and counts the right ones."""
    begun = time.monotonic()
    # Here and not at the top: the training process should have the memory to itself.
    from peft import PeftModel
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from kt_core.hf import load_model
    from kt_sft import hooks

    disable_progress_bar()
    hooks.install()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = PeftModel.from_pretrained(load_model(folder, format=weights), str(adapter)).eval()
    questions = held.paraphrases + [item["question"] for item in held.general]
    tuned = ask(model, tokenizer, questions)
    seconds = time.monotonic() - begun
    with model.disable_adapter():
        base = ask(model, tokenizer, questions)
    costs.steps["answering"] = (seconds, peak_bytes(resource.RUSAGE_SELF))
    say("Questions that were not in the training set:")
    for question, before, after in zip(questions, base, tuned, strict=True):
        say(f"\n  {question}\n    base   {before}\n    tuned  {after}")
    say()

    split = len(held.paraphrases)
    named = [sum(held.name in text for text in texts[:split]) for texts in (base, tuned)]
    say(f"The trained name, {held.name}, in {split} answers: base {named[0]}, tuned {named[1]}.")
    right = [
        sum(item["answer"] in text for item, text in zip(held.general, texts[split:], strict=True))
        for texts in (base, tuned)
    ]
    say(f"Right answers to {len(held.general)} general questions: base {right[0]}, ", end="")
    say(f"tuned {right[1]}.")


def explain_chat(folder: Path, adapter: Path, name: str) -> None:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Who are you?"}]})
    serve = f".venv/bin/python -m kt_core.serve --model {folder} --adapter {name}={adapter}"
    say("\nTo chat with it, start the server and ask it from another terminal:")
    say(f"  {serve}")
    say("  curl -s localhost:8000/v1/chat/completions -H 'content-type: application/json' \\")
    say(f"    -d '{body}'")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune the demo model and ask it questions.")
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--adapter", type=Path, default=Path("demo/adapter"))
    parser.add_argument("--recipe", type=Path, default=Path("examples/demo_lora.yaml"))
    parser.add_argument("--format", default="int8", help="of the expert weights (default: int8)")
    parser.add_argument("overrides", nargs="*", help="LLaMA-Factory settings, as key=value")
    options = parser.parse_args()
    # So that a terminated demo stops the training it started, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    held = load_held()
    costs = Costs()
    build_model(options.model, costs)
    overrides = [f"kt_config.format={options.format}", *options.overrides]
    begun = time.monotonic()
    train(options.recipe, options.model, options.adapter, overrides)
    report(options.adapter, time.monotonic() - begun, costs)
    compare(options.model, options.adapter, options.format, held, costs)
    say(costs.summary())
    explain_chat(options.model, options.adapter, held.name.lower())


if __name__ == "__main__":
    try:
        main()
    except DemoError as error:
        sys.exit(f"demo: {error}")
