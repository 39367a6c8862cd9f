"""Whether an adapter fits a model: the one judge for serving it, merging it and loading it for
training.

A `Site` says what a model has to put an adapter on; it comes from a loaded model, with or without
adapters, or from a skeleton on the meta device (skeleton.py). `fit` refuses what has no place,
another shape or a gap, and gives the rest by meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from kt_core.adapters.extra import Extra, Rows, plain, understand
from kt_core.adapters.factors import Factors
from kt_core.adapters.peft_format import AdapterData
from kt_core.adapters.rules import ends, picked_by, picks_expert
from kt_core.adapters.text_part import Names, names_between
from kt_core.loading.parts import Shape
from kt_core.module import KTExpertsLinear, is_linear
from kt_core.names import PROJECTION_KEYS, PROJECTION_OF, projection_names

_LIMITS = ("layers_to_transform", "layers_pattern", "exclude_modules", "target_parameters")


@dataclass(frozen=True)
class Site:
    """What a model has for an adapter, by the names of the model without adapters.

    name: class of the model. experts: experts modules. parameters: shapes of all other parameters
    and buffers. linears, embeddings: module paths. tokens: the parameters with one row per token,
    input first. tied: parameter -> the one that it is the same as. decoder: path of the text part.
    """

    name: str
    experts: Mapping[str, Shape]
    parameters: Mapping[str, tuple[int, ...]]
    linears: frozenset[str]
    embeddings: frozenset[str]
    tokens: tuple[str, ...]
    tied: Mapping[str, str]
    decoder: str


@dataclass(frozen=True)
class Fitted:
    """An adapter that fits: factors of experts (of all of them) and Linears by path, of embeddings
    as `AdapterData` has them, values of whole parameters, rows of embeddings and their tied head.
    token_rows: how many rows embeddings and head have with it, None where it leaves them alone.
    """

    experts: Mapping[str, Mapping[str, Factors]]
    dense: Mapping[str, Factors]
    embeddings: Mapping[str, Factors]
    values: Mapping[str, Tensor]
    rows: Mapping[str, Rows]
    token_rows: int | None


def site_of(model: Any, experts: Mapping[str, Shape] | None = None) -> Site:
    """The site that a transformers model is. `experts`: where they are not in CPU memory."""
    found = dict(experts or {})
    linears, embeddings = set(), set()
    for name, module in model.named_modules(remove_duplicate=False):
        path = plain(name)
        if ".lora_" in f".{name}" or ".modules_to_save." in f"{name}.":
            continue
        if isinstance(module, KTExpertsLinear):
            found[path] = (module.num_experts, module.hidden_dim, module.intermediate_dim)
        elif is_linear(module):
            linears.add(path)
        elif isinstance(module, nn.Embedding):
            embeddings.add(path)
    parameters = {
        plain(name): tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not any(part in f".{name}" for part in (".lora_", ".modules_to_save.", ".trainable_"))
    }
    own = {name for name in parameters if name.rpartition(".")[0] in found}
    return Site(
        name=type(model).__name__,
        experts=found,
        parameters={name: shape for name, shape in parameters.items() if name not in own},
        linears=frozenset(linears),
        embeddings=frozenset(embeddings),
        tokens=tuple(_token_weights(model)),
        tied=dict(model.all_tied_weights_keys),
        decoder=_path_of(model, model.get_decoder()),
    )


def _path_of(model: nn.Module, part: nn.Module) -> str:
    return next((plain(name) for name, module in model.named_modules() if module is part), "")


def _token_weights(model: Any) -> Iterable[str]:
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        for name, other in model.named_modules(remove_duplicate=False):
            if other is module:
                yield f"{plain(name)}.weight"
                break


def names_of(data: AdapterData, site: Site) -> Names:
    """How the adapter and the model call the same modules."""
    known = {*site.experts, *(name.rpartition(".")[0] for name in site.parameters)}
    return names_between([*data.experts] or [*data.dense, *data.embeddings], known, site.decoder)


def translated(data: AdapterData, names: Names) -> AdapterData:
    """`data` with the model's names; its config keeps the adapter's."""
    return dataclasses.replace(
        data,
        experts=names.all_to_ours(data.experts),
        dense=names.all_to_ours(data.dense),
        embeddings=names.all_to_ours(data.embeddings),
        extra=names.all_to_ours(data.extra),
        variant=names.all_to_ours(data.variant),
    )


def fit(data: AdapterData, site: Site, where: str) -> Fitted:
    """`data` as it applies to the model of `site`, by the model's names; the adapter may be of
    another class of the same checkpoint (text_part.py).

    Raises ValueError, naming the tensor, for an adapter of another model, a shape that does not
    fit, or a file in which something is missing that its config promises.
    """
    names = names_of(data, site)
    if names.same:
        return _fit(data, site, where)
    if names.other_class:
        _check_text_only(data, site, names, where)
    # Targets and patterns of the config are in the adapter's own names, so the judging is too.
    fitted = _fit(data, _in_their_names(site, names), where)
    return dataclasses.replace(
        fitted,
        experts=names.all_to_ours(fitted.experts),
        dense=names.all_to_ours(fitted.dense),
        embeddings=names.all_to_ours(fitted.embeddings),
        values=names.all_to_ours(fitted.values),
        rows=names.all_to_ours(fitted.rows),
    )


def _in_their_names(site: Site, names: Names) -> Site:
    """`site` as the adapter's class would call it, without the parts that this class lacks."""
    top = {name.rpartition(".")[0] for name in site.tokens}

    def kept(name: str) -> bool:
        return not names.other_class or names.is_text(name) or name.rpartition(".")[0] in top

    def module_kept(path: str) -> bool:
        return kept(path) or path in top

    return dataclasses.replace(
        site,
        experts={names.to_theirs(k): v for k, v in site.experts.items()},
        parameters={names.to_theirs(k): v for k, v in site.parameters.items() if kept(k)},
        linears=frozenset(names.to_theirs(p) for p in site.linears if module_kept(p)),
        embeddings=frozenset(names.to_theirs(p) for p in site.embeddings if module_kept(p)),
        tokens=tuple(names.to_theirs(name) for name in site.tokens),
        tied={names.to_theirs(k): names.to_theirs(v) for k, v in site.tied.items()},
        decoder=names.theirs,
    )


def _check_text_only(data: AdapterData, site: Site, names: Names, where: str) -> None:
    """Raises ValueError for what lies outside of the text part, in an adapter of another class."""
    top = {name.rpartition(".")[0] for name in site.tokens}
    for path in (*data.experts, *data.dense, *data.embeddings):
        if not path.startswith(f"{names.theirs}.") and path not in top:
            raise ValueError(
                f"{where} adapts {path}, which is no part of the text model that {site.name} is; "
                "merge it into the checkpoint, which has all parts, or train it without them "
                "(freeze_vision_tower and freeze_multi_modal_projector: true)"
            )


def _fit(data: AdapterData, site: Site, where: str) -> Fitted:
    extra = understand(data, where)
    places = _Places(site, where, str(data.config.get("base_model_name_or_path")))
    places.check_extra(extra)
    experts = places.experts(data)
    places.check_matrices(data, extra.values)
    _check_complete(data, site, where)
    _check_biases(data, extra.values, site, where)
    return Fitted(
        experts,
        data.dense,
        data.embeddings,
        extra.values,
        _tied_rows(extra.rows, extra.values, site),
        _token_rows(extra.values, site, where),
    )


@dataclass(frozen=True)
class _Places:
    """Whether tensors of the adapter `where`, trained on `base`, have a place and its shape."""

    site: Site
    where: str
    base: str

    def check_extra(self, extra: Extra) -> None:
        """Values have the shape of their parameter; embeddings and head may have more rows."""
        for name, tensor in extra.values.items():
            if name not in self.site.parameters:
                self._refuse(f"holds {name}, which {self.site.name} does not have")
            shape = self.site.parameters[name]
            if name not in self.site.tokens or tensor.shape[1:] != shape[1:]:
                self._same(tensor, shape, name)
        for path, rows in extra.rows.items():
            shape = self.site.parameters.get(f"{path}.weight", ())
            if len(shape) != 2 or (rows.indices and max(rows.indices) >= shape[0]):
                self._refuse(f"trains rows of {path}, which {self.site.name} does not have")
            self._same(rows.values, (len(rows.indices), shape[1]), f"the rows of {path}")

    def experts(self, data: AdapterData) -> dict[str, dict[str, Factors]]:
        """The factors of experts, of all experts of each module."""
        out: dict[str, dict[str, Factors]] = {}
        for path, module in data.experts.items():
            if path not in self.site.experts:
                self._refuse(f"adapts {path}, where {self.site.name} has no experts")
            e, h, i = self.site.experts[path]
            out[path] = {}
            for p, part in module.items():
                f = out[path][p] = _all_experts(part, e, data.config, path, p, self.where)
                fan_in, fan_out = (i, h) if p == "down" else (h, i)
                self._same(f.a, (e, f.rank, fan_in), f"{path} {p}_proj lora_A")
                self._same(f.b, (e, fan_out, f.rank), f"{path} {p}_proj lora_B")
        return out

    def check_matrices(self, data: AdapterData, values: Mapping[str, Tensor]) -> None:
        """Factors have the shapes of their matrix, which `values` may have replaced."""
        shapes = {**self.site.parameters, **{n: tuple(t.shape) for n, t in values.items()}}
        for path, f in data.dense.items():
            shape = shapes.get(f"{path}.weight", ())
            if len(shape) != 2:
                self._refuse(f"adapts {path}, where {self.site.name} has no matrix")
            self._same(f.a, (f.rank, shape[1]), f"{path} lora_A")
            self._same(f.b, (shape[0], f.rank), f"{path} lora_B")
        for path, f in data.embeddings.items():
            if path not in self.site.embeddings:
                self._refuse(f"adapts {path}, where {self.site.name} has no embedding")
            shape = shapes[f"{path}.weight"]
            self._same(f.a, (f.rank, shape[0]), f"{path} lora_embedding_A")
            self._same(f.b, (shape[1], f.rank), f"{path} lora_embedding_B")

    def _same(self, tensor: Tensor, shape: tuple[int, ...], what: str) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{self.where}: {what} has shape {tuple(tensor.shape)} but this model needs "
                f"{shape}; it was trained on another model ({self.base})"
            )

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"{self.where} {what}; it was trained on another model ({self.base})")


def _token_rows(values: Mapping[str, Tensor], site: Site, where: str) -> int | None:
    if not any(name in values for name in site.tokens):
        return None
    counts = {n: len(values[n]) if n in values else site.parameters[n][0] for n in site.tokens}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"{where} leaves the model with {counts} rows; after resize_vocab train embeddings and "
            "head both with additional_target"
        )
    return next(iter(counts.values()))


def _all_experts(
    f: Factors, count: int, config: Mapping[str, Any], path: str, projection: str, where: str
) -> Factors:
    """Zeros for the last experts where the config leaves those out."""
    has = f.a.shape[0]
    if has >= count:
        return f
    names = projection_names(projection)
    left_out = bool(config.get("target_modules")) and all(
        picks_expert(config, path, e, names) is None for e in range(has, count)
    )
    if not left_out:
        raise ValueError(
            f"{where}: {path}.{PROJECTION_KEYS[projection]} has factors for {has} experts but this "
            f"model needs {count}; the file is incomplete or was trained on another model "
            f"({config.get('base_model_name_or_path')})"
        )
    a, b = (torch.cat([t, t.new_zeros(count - has, *t.shape[1:])]) for t in (f.a, f.b))
    return Factors(a, b, f.scaling)


def _check_complete(data: AdapterData, site: Site, where: str) -> None:
    """Raises ValueError if the config means a module for which the file has nothing."""
    config = data.config
    lost: dict[str, list[str]] = {}
    meant: dict[str, int] = {}
    for path in sorted(site.linears | site.embeddings):
        # Beside experts such a target means them, whatever Linears have the same name.
        target = None if data.experts and _leaf(path) in PROJECTION_OF else picked_by(config, path)
        if target is not None:
            meant[target] = meant.get(target, 0) + 1
            if path not in data.dense and path not in data.embeddings:
                lost.setdefault(target, []).append(path)
    for parameter in config.get("target_parameters") or ():
        for name in site.parameters:
            if ends(name, parameter):
                meant[parameter] = meant.get(parameter, 0) + 1
                if name.removesuffix(".weight") not in data.dense:
                    lost.setdefault(parameter, []).append(name)
    for path in sorted(site.experts) if data.experts else ():
        for target, name in _lost_of_experts(data, path):
            meant[target] = len(site.experts) if name == path else 1
            lost.setdefault(target, []).append(name)
    if lost:
        target, names = next(iter(lost.items()))
        raise ValueError(
            f"{where} targets {target} but has no tensors for {names[0]} ({len(names)} of "
            f"{meant[target]} are missing); the file is incomplete, save or copy the adapter "
            f"again, or it was trained on another model ({config.get('base_model_name_or_path')})"
        )


def _lost_of_experts(data: AdapterData, path: str) -> Iterable[tuple[str, str]]:
    """(target, what is missing) of one experts module, in a file that has tensors of experts."""
    config, found = data.config, data.experts.get(path, {})
    for p, key in PROJECTION_KEYS.items():
        if p in found:
            continue
        parameter = f"{path}.{'down_proj' if p == 'down' else 'gate_up_proj'}"
        target = picks_expert(config, path, None, projection_names(p))
        target = target or picks_expert(config, path, 0, projection_names(p))
        for t in config.get("target_parameters") or ():
            target = t if ends(parameter, t) else target
        if target is not None and not (data.whole and found):  # zeros that stock peft needs
            yield target, f"{path}.{key}" if found else path
            return
    if not found and not any(config.get(key) for key in _LIMITS):
        yield "experts", path


def _check_biases(data: AdapterData, values: Mapping[str, Tensor], site: Site, where: str) -> None:
    """peft does not save the biases that it trains with bias: lora_only."""
    if data.config.get("bias", "none") == "none":
        return
    for path in data.dense:
        if f"{path}.bias" in site.parameters and f"{path}.bias" not in values:
            raise ValueError(
                f"{where} was trained with bias={data.config['bias']!r} but does not hold "
                f"{path}.bias (peft leaves such biases out of the file for lora_only); train it "
                "with bias: none or all"
            )


def _tied_rows(
    rows: Mapping[str, Rows], values: Mapping[str, Tensor], site: Site
) -> dict[str, Rows]:
    """Rows of an embedding are those of a head tied to it too, unless it has values of its own."""
    out = dict(rows)
    for twin, source in site.tied.items():
        for one, other in ((twin, source), (source, twin)):
            path, tied = (name.removesuffix(".weight") for name in (one, other))
            if path in rows and tied not in rows and other not in values:
                out[tied] = rows[path]
    return out


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1]
