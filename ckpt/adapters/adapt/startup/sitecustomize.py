"""Installs the hooks of `ckpt-run --adapt` at the start of Python, and runs the sitecustomize that this file hides."""

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path

_FOLDER = Path(__file__).parent
_HOOKS = "ckpt.adapters.adapt.startup.hooks"


def _install_hooks() -> None:
    """Load the hooks from their file, because the Python of the script may lack ckpt or import it later."""
    loader = SourceFileLoader(_HOOKS, str(_FOLDER / "hooks.py"))
    module = module_from_spec(ModuleSpec(_HOOKS, loader, origin=loader.path))
    sys.modules[_HOOKS] = module
    loader.exec_module(module)
    module.install()


def _run_hidden() -> None:
    """Run the sitecustomize that Python would have found without this folder."""
    sys.path[:] = [entry for entry in sys.path if Path(entry) != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _install_hooks()
except Exception as error:  # the script runs without the hooks
    what = f"--adapt does not work here ({type(error).__name__}: {error}), and the script is not saved"
    print(f"ckpt: {what}; use --adapt=off, or install ckpt for this Python", file=sys.stderr)
_run_hidden()
