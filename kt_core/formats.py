"""The weight formats that are compiled in, as the kernels describe themselves.

Names, groups and domains are said once, in the format's own file in csrc/format/; everything else
asks here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from kt_core import _kt

DEFAULT = "int8"


@dataclass(frozen=True)
class WeightFormat:
    """How weights of experts are stored.

    ``bits`` per value without scales; ``scale_bits``: of a scale, 16 or 32, 0 without; ``zeros``:
    whether there is a zero point (8 bits) per scale; ``factor``: whether a channel has a second
    scale (32 bits); ``codes``: the format of published codes that are packed as they are
    (kt_core/loading/codes.py); ``groups``: values of the reduction dimension per scale that may be
    asked for, 0 being one scale per channel; ``default_group``: of them, the one that is used where
    nobody asks; ``int8_domain``: whether products with quantized rows exist, in the domains "int8"
    and "int16", beside those of "bf16".
    """

    name: str
    bits: int
    scale_bits: int
    zeros: bool
    factor: bool
    codes: str
    groups: tuple[int, ...]
    default_group: int
    int8_domain: bool

    @property
    def scaled(self) -> bool:
        """Whether weights are rounded to codes with scales."""
        return self.scale_bits > 0

    @property
    def domains(self) -> tuple[str, ...]:
        """Values of `compute` that its kernels know."""
        return ("bf16", "int16", "int8") if self.int8_domain else ("bf16",)

    def check_group(self, group: int | None) -> int:
        """The group that is used for a setting. Raises ValueError for one that does not exist.

        A format without scales takes None and 0 only.
        """
        if group is None:
            return self.default_group
        if group not in self.groups:
            if not self.scaled:
                raise ValueError(
                    f"group {group} has no meaning for format {self.name}, which has no scales; "
                    "remove it"
                )
            names = [str(g) if g else "0 (one scale per channel)" for g in self.groups]
            raise ValueError(
                f"group is {group}; format {self.name} takes {', '.join(names[:-1])} or {names[-1]}"
            )
        return group


@functools.cache
def all_formats() -> Mapping[str, WeightFormat]:
    """Every format by name, most bits first."""
    found = {
        k["format"]: WeightFormat(
            k["format"],
            k["bits"],
            k["scale_bits"],
            k["zeros"],
            k["factor"],
            k["codes"],
            tuple(k["groups"]),
            k["default_group"],
            k["int8_domain"],
        )
        for k in _kt.kernels()
    }
    return {f.name: f for f in sorted(found.values(), key=lambda f: (-f.bits, f.name))}


def names() -> tuple[str, ...]:
    """Their names, most bits first."""
    return tuple(all_formats())


def scaled() -> tuple[str, ...]:
    """Names of those that round weights to codes with scales, in which they are smaller."""
    return tuple(f.name for f in all_formats().values() if f.scaled)


def of(name: str) -> WeightFormat:
    """The format of that name. Raises ValueError naming those that exist."""
    try:
        return all_formats()[name]
    except KeyError:
        raise ValueError(
            f"format {name!r} is not known; choose one of {', '.join(names())}"
        ) from None
