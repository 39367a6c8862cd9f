"""What stands in the place of names of other libraries: nothing else puts anything there.

`replace` is for names that the whole process sees, of a module or a class; `restore` puts back what
stood there. `give` is for an attribute of one object, a model of ours for instance: it lives as
long as the object, or until its owner takes it off, and other objects of the class keep theirs.
Both are told why, and `listing` is what DESIGN.md's table is compared with.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_MISSING = object()  # what is inherited stands in a base class


@dataclass(frozen=True)
class Patch:
    """One name that was replaced.

    by: the module of ours that asked. what: the name, with that of its class or module before it.
    why: no public way serves. owner, ours, stood: where it is, what stands there, what stood there.
    """

    by: str
    what: str
    why: str
    owner: Any
    name: str
    ours: Any
    stood: Any


_patches: list[Patch] = []
_given: set[tuple[str, str, str]] = set()  # by, what, why of attributes of single objects


def replace(owner: Any, name: str, ours: Any, *, by: str, why: str) -> None:
    """Puts `ours`, as it would stand in the class or module `owner`, in the place of `name`."""
    stood = vars(owner).get(name, _MISSING)
    _patches.append(Patch(by, f"{_short(owner)}.{name}", why, owner, name, ours, stood))
    setattr(owner, name, ours)


def inserted(items: list[Any], item: Any, what: str, *, by: str, why: str) -> None:
    """Notes that `item` was put into the list `items` of another library, from which `restore`
    takes it; again is harmless.
    """
    if not any(p.ours is item for p in _patches):
        _patches.append(Patch(by, what, why, items, "", item, _MISSING))


def give(owner: Any, name: str, ours: Any, *, of: str, by: str, why: str) -> None:
    """Sets an attribute of the object `owner` alone, past a class's own `__setattr__`; `of` says
    what kind of object it is.
    """
    _given.add((by, f"{name} of {of}", why))
    object.__setattr__(owner, name, ours)


def listing() -> list[tuple[str, str, str]]:
    """(by, what, why) of all that was replaced or given, each once, in the order of their names."""
    return sorted({(p.by, p.what, p.why) for p in _patches} | _given)


def replaced(by: str | None = None) -> list[Patch]:
    """What stands in the place of names of the process now, or what module `by` put there."""
    return [p for p in _patches if by in (None, p.by)]


def restore(by: str | None = None) -> None:
    """Puts back what stood there, all of it or what module `by` replaced, the last one first."""
    for patch in reversed(replaced(by)):
        _patches.remove(patch)
        if isinstance(patch.owner, list):
            patch.owner.remove(patch.ours)
        elif patch.stood is _MISSING:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, patch.stood)
            if inspect.ismodule(patch.owner):
                _restore_copies(patch)


def _restore_copies(patch: Patch) -> None:
    """Modules of the same library that imported the name meanwhile have a copy of ours."""
    for module in _library(patch.owner.__name__):
        for name, value in list(vars(module).items()):
            if value is patch.ours:
                setattr(module, name, patch.stood)
            elif isinstance(value, list):
                value[:] = [patch.stood if item is patch.ours else item for item in value]


def _library(module: str) -> Iterator[Any]:
    top = module.partition(".")[0]
    for name, found in list(sys.modules.items()):
        if name.partition(".")[0] == top and found is not None:
            yield found


def _short(owner: Any) -> str:
    """A class or module as the table calls it, its library first."""
    library, _, rest = str(owner.__name__).partition(".")
    if not inspect.ismodule(owner):
        library, rest = owner.__module__.partition(".")[0], owner.__name__
    return f"{library} {rest.rpartition('.')[2]}" if rest else library
