"""Arguments of replaced functions that this package does not know.

What stands in front of a function of another library hands on whatever it is given. Where it does
the work itself there is nobody to hand on to: an argument of a newer version that would be ignored
is refused.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping
from typing import Any


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
