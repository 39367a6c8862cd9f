"""torch's autoload of our hooks: cheap, silent, patient, and unable to break `import torch`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _python(script: str, *path: Path, **environment: str) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))} | environment
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_entry_point_is_installed():
    found = [e for e in entry_points(group="torch.backends") if e.name == "kt_sft"]
    assert [e.value for e in found] == ["kt_sft.bootstrap:autoload"]


def test_import_torch_imports_nothing_of_ours_but_the_bootstrap():
    script = """
import sys, torch
ours = sorted(m for m in sys.modules if m.split(".")[0] in ("kt_core", "kt_sft"))
heavy = {"transformers", "peft", "accelerate", "llamafactory"} & set(sys.modules)
print(ours, heavy, [type(f).__name__ for f in sys.meta_path].count("_Finder"))
"""
    assert _python(script) == "['kt_sft', 'kt_sft.bootstrap'] set() 1\n"


def test_autoload_never_raises(tmp_path):
    script = """
import sys
from kt_sft import bootstrap
class Broken(list):
    def insert(self, *args):
        raise RuntimeError("no room")
sys.meta_path = Broken(sys.meta_path)
bootstrap.autoload()
print("alive")
"""
    assert _python(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "alive\n"


def _fake(root: Path, parser: str) -> Path:
    """A package called llamafactory of which we know what it does."""
    package = root / "llamafactory" / "hparams"
    package.mkdir(parents=True)
    (root / "llamafactory" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from .parser import marker\n")
    (package / "parser.py").write_text(parser)
    return root


SPY = """
import sys, types
spy = types.ModuleType("kt_sft.llamafactory.seam")
def adapt_parser(module):
    print("adapted", module.__name__, "finished" in vars(module))
    module.marker = "ours"
spy.adapt_parser = adapt_parser
sys.modules["kt_sft.llamafactory.seam"] = spy
"""


def test_modules_imported_later_are_adapted_once(tmp_path):
    root = _fake(tmp_path, "marker = 'stock'\nfinished = True\n")
    script = SPY + "import torch, llamafactory.hparams as h; print(h.marker)"
    assert _python(script, root) == "adapted llamafactory.hparams.parser True\nours\n"


def test_modules_imported_before_torch_are_adapted_at_once(tmp_path):
    root = _fake(tmp_path, "marker = 'stock'\nfinished = True\n")
    script = (
        SPY
        + "import llamafactory.hparams as h, torch; print(sys.modules[h.parser.__name__].marker)"
    )
    assert _python(script, root) == "adapted llamafactory.hparams.parser True\nours\n"


def test_a_half_initialised_module_is_adapted_when_it_is_finished(tmp_path):
    """torch is first imported from inside the module; its importer binds our version."""
    root = _fake(tmp_path, "import torch\nmarker = 'stock'\nfinished = True\n")
    script = (
        SPY + "import llamafactory.hparams as h; print(h.marker, h.parser.__spec__._initializing)"
    )
    assert _python(script, root) == "adapted llamafactory.hparams.parser True\nours False\n"


def test_a_module_that_fails_after_torch_is_left_alone(tmp_path):
    root = _fake(tmp_path, "import torch\nmarker = 1 / 0\n")
    script = (
        SPY
        + """
try:
    import llamafactory.hparams
except ZeroDivisionError:
    print("its own error")
"""
    )
    assert _python(script, root) == "its own error\n"


def test_a_llamafactory_that_we_do_not_know_stays_usable(tmp_path):
    root = _fake(tmp_path, "marker = 'stock'\n")
    script = "import torch, llamafactory.hparams as h; print(h.marker)"
    env = {"PYTHONPATH": os.pathsep.join(map(str, (root, ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | env, capture_output=True, text=True
    )
    assert done.stdout == "stock\n"
    assert "llamafactory.hparams.parser is left as it is, use_kt will not work" in done.stderr


def test_launch_runs_scripts_and_modules(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(__name__, sys.argv[1:])\n")
    for target in (str(tmp_path / "script.py"), "script"):
        env = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
        done = subprocess.run(
            [sys.executable, "-m", "kt_sft.launch", target, "a", "--b"],
            env=os.environ | env,
            capture_output=True,
            text=True,
        )
        assert done.stdout == "__main__ ['a', '--b']\n", done.stderr
    done = subprocess.run([sys.executable, "-m", "kt_sft.launch"], capture_output=True, text=True)
    assert done.returncode != 0 and "usage: python -m kt_sft.launch" in done.stderr
