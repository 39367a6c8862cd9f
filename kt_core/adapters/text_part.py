"""Adapters of one class of a model on another class of the same checkpoint.

A multimodal class holds the text model that the text class is: LLaMA-Factory trains
`model.language_model.layers.0.mlp.experts`, the text class calls it `model.layers.0.mlp.experts`.
Where an adapter's paths are not the model's, what stands before the layers of the model's decoder
says what stands before the adapter's. Older adapters of Mixtral and its kin also say
`block_sparse_moe` where the model says `mlp`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_OLD, _NEW = ".block_sparse_moe.", ".mlp."


@dataclass(frozen=True)
class Names:
    """How an adapter and a model call the same things: paths of the decoder, and whether the
    adapter has the old name of the experts' block.
    """

    theirs: str
    ours: str
    old: bool

    @property
    def same(self) -> bool:
        """Whether there is nothing to translate."""
        return self.theirs == self.ours and not self.old

    @property
    def other_class(self) -> bool:
        """Whether the adapter was trained on a class with another path of the decoder."""
        return self.theirs != self.ours

    def to_ours(self, name: str) -> str:
        """The model's name of a module or parameter that the adapter calls `name`."""
        if self.old:
            name = name.replace(_OLD, _NEW)
        return _swapped(name, self.theirs, self.ours)

    def all_to_ours(self, by_name: Mapping[str, T]) -> dict[str, T]:
        """The same values by the model's names."""
        return {self.to_ours(name): value for name, value in by_name.items()}

    def to_theirs(self, name: str) -> str:
        """The adapter's name of a module or parameter that the model calls `name`."""
        name = _swapped(name, self.ours, self.theirs)
        return name.replace(_NEW, _OLD) if self.old else name

    def is_text(self, name: str) -> bool:
        """Whether the model's `name` lies in its decoder."""
        return name == self.ours or name.startswith(f"{self.ours}.")


def names_between(paths: Sequence[str], known: Set[str], decoder: str) -> Names:
    """How to translate the module paths of an adapter; `known` are those of the model, `decoder`
    is the path of its text decoder in it ("": the model itself).

    The adapter's decoder is what stands before the part that the model's decoder has too, in most
    of the paths that the model does not have.
    """
    old = any(_OLD in f"{p}." for p in paths) and not any(_OLD in f"{p}." for p in known)
    votes: Counter[str] = Counter()
    for path in paths:
        name = path.replace(_OLD, _NEW) if old else path
        parts = name.split(".")
        for i in range(1, len(parts)) if decoder and name not in known else ():
            if f"{decoder}.{'.'.join(parts[i:])}" in known:
                votes[".".join(parts[:i])] += 1
                break
    theirs = votes.most_common(1)[0][0] if votes else decoder
    return Names(theirs, decoder, old)


def _swapped(name: str, before: str, after: str) -> str:
    if before and (name == before or name.startswith(f"{before}.")):
        return after + name[len(before) :]
    return name
