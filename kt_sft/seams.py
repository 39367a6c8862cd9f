"""Functions of ours in the place of other libraries', and arguments that they do not know.

What stands in front of a function of another library hands on whatever it is given, by name where
it does not list it itself. Where it does the work itself there is nobody to hand on to: an argument
of a newer version that would be ignored is refused.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kt_core import patches


def wrap(
    owner: Any,
    name: str,
    replacement: Callable[..., Any],
    expected: str,
    *,
    by: str,
    why: str,
) -> None:
    """Puts `replacement(original, ...)` in the place of owner.name until patches.restore().

    expected: what the names of its first parameters must be, separated by spaces. Raises
    RuntimeError where they are others. The rest is as in patches.replace.
    """
    stored = inspect.getattr_static(owner, name)
    function = stored.__func__ if isinstance(stored, classmethod) else stored
    expect(function, expected)
    hooked = functools.wraps(function)(by_name(function, replacement))
    vars(hooked)["kt_replacement"] = replacement
    ours = classmethod(hooked) if isinstance(stored, classmethod) else hooked
    patches.replace(owner, name, ours, by=by, why=why)


def expect(function: Callable[..., Any], names: str) -> None:
    """Raises RuntimeError, naming the library's version, if the first parameters of one of its
    functions are not called `names`.
    """
    wanted = names.split()
    found = list(inspect.signature(function).parameters)[: len(wanted)]
    if found != wanted:
        library = function.__module__.partition(".")[0]
        raise RuntimeError(
            f"{function.__module__}.{function.__qualname__} of {library} "
            f"{importlib.metadata.version(library)} takes {found}, not {wanted}; this version is "
            f"not supported, install a {library} from constraints.txt"
        )


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
