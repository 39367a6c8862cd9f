"""Arguments of replaced functions that this package does not know.

What stands in front of a function of another library hands on whatever it is given, by name where
it does not list it itself. Where it does the work itself there is nobody to hand on to: an argument
of a newer version that would be ignored is refused.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any


def by_name(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """`replacement(original, ...)` as a function of the arguments of `original`: positional ones
    beyond those that `replacement` lists reach it by the name that they have in `original`.
    """
    parameters = list(inspect.signature(replacement).parameters.values())[1:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        count = None
    else:
        count = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    theirs = inspect.signature(original).parameters.values()
    names = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]

    def call(*args: Any, **kw: Any) -> Any:
        named = dict(zip(names[count:], args[count:], strict=False)) if count is not None else {}
        if named and (len(args) > len(names) or named.keys() & kw.keys()):
            return original(*args, **kw)  # which says what is wrong
        return replacement(original, *args[:count], **named, **kw)

    return call


def refuse_unknown(
    given: Mapping[str, Any], known: Collection[str], where: str, library: str
) -> None:
    """Raises ValueError for the first argument in `given` that is not in `known` and asks for
    something. `where` names the replaced function, `library` the distribution it is from.
    """
    for name, value in given.items():
        empty = value is None or value is False or (isinstance(value, Collection) and not value)
        if name not in known and not empty:
            version = importlib.metadata.version(library)
            raise ValueError(
                f"{where}: {name}={value!r} of {library} {version} is not known for a model with "
                f"experts in CPU memory and would be ignored; leave it out, or install a {library} "
                "from constraints.txt"
            )
