"""Where this process is: the experts that were entered last, and whether somebody wants it to stop.

Experts are called once per layer and pass, so they are the clock of a step: messages about a lost
rank name the layer, and a process that is alone may stop between two layers.
"""

from __future__ import annotations


class StopRequestedError(BaseException):
    """Ends the step in flight; not an Exception, so that nothing on the way takes it for one."""


_last = "before the first layer"
_stop = False


def enter(layer: str, direction: str) -> None:
    """Called by every pass ("forward" or "backward") of a layer's experts.

    Raises StopRequestedError after `stop_here(True)`.
    """
    global _last
    if _stop:
        raise StopRequestedError
    _last = f"in the {direction} of {layer}"


def leave(layer: str, direction: str) -> None:
    """The end of a pass; what follows, communication for one, belongs to the layer after it."""
    global _last
    _last = f"after the {direction} of {layer}"


def where() -> str:
    """The last place, as in "after the forward of model.layers.3.mlp.experts"."""
    return _last


def stop_here(wanted: bool) -> None:
    """Whether the next pass of any layer ends the step in flight."""
    global _stop
    _stop = wanted
