"""Runs inside every `import torch`: the entry point of group `torch.backends`, torch's own autoload
of extensions.

It puts one finder at the head of sys.meta_path that waits for four modules of LLaMA-Factory to be
imported and then lets kt_sft.llamafactory.seam adapt them. Nothing else is imported here and
nothing is raised. TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches torch's autoload off; `python -m
kt_sft.launch` then does the same.
"""

import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_HOOKS = {
    "llamafactory.hparams.model_args": "adapt_model_args",
    "llamafactory.hparams.parser": "adapt_parser",
    "llamafactory.model.loader": "adapt_loader",
    "llamafactory.train.tuner": "adapt_tuner",
}


def autoload() -> None:
    """Installs the finder once per process. Never raises: a failure here would break `import
    torch`.
    """
    try:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
        for name in _HOOKS:
            if name in sys.modules:
                _when_ready(sys.modules[name])
    except Exception as error:
        logging.getLogger("kt").warning("kt: automatic loading is off: %s", error)


def _adapt(module: ModuleType) -> None:
    """Hands a finished module to kt_sft.llamafactory.seam. Stock LLaMA-Factory stays usable
    whatever happens in there.
    """
    try:
        patches = importlib.import_module("kt_core.patches")
        if any(patch.owner is module for patch in patches.replaced()):
            return
        finder = next(finder for finder in sys.meta_path if isinstance(finder, _Finder))
        patches.inserted(
            *(sys.meta_path, finder, "sys.meta_path"),
            by=__name__,
            why="torch's autoload runs before LLaMA-Factory exists",
        )
        adapters = importlib.import_module("kt_sft.llamafactory.seam")
        getattr(adapters, _HOOKS[module.__name__])(module)
    except Exception as error:
        logging.getLogger("kt").warning(
            "kt: %s is left as it is, use_kt will not work: %s", module.__name__, error
        )


def _when_ready(module: ModuleType) -> None:
    """Adapts a module that is in sys.modules: now, or, if it is still being executed, the moment it
    is finished.

    torch may be imported for the first time from inside one of the modules we wait for; its classes
    do not exist yet, and whoever imports it binds them right after. The import system marks the end
    by `spec._initializing = False`.
    """
    spec = module.__spec__
    if spec is None or not vars(spec).get("_initializing", False):
        _adapt(module)
        return

    class Watched(importlib.machinery.ModuleSpec):
        @property
        def _initializing(self) -> bool:
            return True

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            if value:
                return
            self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
            self._initializing = False
            if sys.modules.get(self.name) is module:
                _adapt(module)

    spec.__class__ = Watched


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the other finders find our four modules and wraps the loader they
    give.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _HOOKS:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _run_after(spec.loader, _adapt)
                return spec
        return None


def _run_after(loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
    """Makes this loader object, which serves one module, call `then` once that module's code has
    run.
    """
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        then(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
