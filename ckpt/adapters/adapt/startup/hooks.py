"""The hooks of `ckpt-run --adapt`: which method of which framework is wrapped after its import, and when they act.

This file needs only the standard library. `sitecustomize` loads it at the start of Python. A wrapped method imports ckpt at its
first call, so that a script starts as fast as before and may set up its environment first.

Hooks act in one process only: the first Python process of a rank. Its environment gets CKPT_ADAPTED with the process id, so
processes that it starts or forks are left alone. A launcher such as torchrun is not adapted, and its ranks are adapted. The
fork server of `ckpt-run` installs the hooks, which then act in the ranks that it forks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "CKPT_ADAPT"
"""The environment variable that `ckpt-run --adapt` sets to "on". With "off", `--adapt` does nothing."""

EVERY_VARIABLE = "CKPT_ADAPT_EVERY"
"""The environment variable with the number of steps between saves, where the framework has no such setting."""

ADAPTED_VARIABLE = "CKPT_ADAPTED"
"""The environment variable with the id of the process in which the hooks act."""

_ATTEMPT_VARIABLE = "CKPT_ATTEMPT"  # the fork server has none

_LAUNCHER_SCRIPTS = {"torchrun", "accelerate", "accelerate-launch", "deepspeed", "ckpt-run"}
_LAUNCHER_MODULES = ("torch.distributed.", "accelerate.commands.", "deepspeed.launcher.", "paddle.distributed.launch", "ckpt.")

_LIGHTNING_PACKAGES = {"lightning", "pytorch_lightning"}
"""Packages that find the callback of ckpt by an entry point, so that no hook is needed."""


@dataclass(frozen=True)
class Hook:
    """A method that is wrapped once its module is imported."""

    name: str
    """What users call it."""
    module: str
    method: str
    """`Class.method` in the module."""
    function: str
    """`module:function` of ckpt, which is called with the original method and the arguments of the call."""
    effect: str
    """What `--adapt` does there, for `ckpt-run --adapt=list`."""


@dataclass(frozen=True)
class Refusal:
    """A framework whose own loops are not adapted."""

    name: str
    """What users call it."""
    module: str
    reason: str
    """Why it is not adapted, and what to do instead."""


HOOKS = (
    Hook(
        "transformers.Trainer", "transformers.trainer", "Trainer.train", "ckpt.adapters.adapt.transformers:train",
        "train saves as its TrainingArguments say, and resumes",
    ),
    Hook(
        "keras.Model", "keras.src.models.model", "Model.fit", "ckpt.adapters.adapt.keras:fit",
        "fit saves at the interval that loses the least time, and resumes",
    ),
    Hook(
        "paddle.Model", "paddle.hapi.model", "Model.fit", "ckpt.adapters.adapt.paddle:fit",
        "fit saves at the interval that loses the least time, and resumes",
    ),
    Hook(
        "accelerate.Accelerator", "accelerate.accelerator", "Accelerator.prepare", "ckpt.adapters.adapt.accelerate:prepare",
        "save_state and load_state use ckpt, if the script calls them",
    ),
)  # fmt: skip

LIGHTNING = "Trainer.fit saves to CKPT_DIR and resumes, by the entry point of Lightning"
"""What `--adapt` does for Lightning, which has no hook here."""

_POSITION = "only the script knows where its loop is: use ckpt.Checkpointer in it"

REFUSALS = (
    Refusal("accelerate", "accelerate", "only the script knows where its loop is: call save_state and load_state in it"),
    Refusal("deepspeed", "deepspeed", "the loop of the script saves its engine: call its save_checkpoint there"),
    Refusal("jax", "jax", _POSITION),
    Refusal("mindspore", "mindspore", _POSITION),
    Refusal("paddle", "paddle", f"outside of Model.fit, {_POSITION}"),
    Refusal("tensorflow", "tensorflow", f"outside of Model.fit, {_POSITION}"),
    Refusal("tf_keras", "tf_keras", "it is Keras 2: use Keras 3"),
    Refusal("torch", "torch", _POSITION),
)

_REFUSED_AT_IMPORT = {
    "deepspeed",
    "mindspore",
    "tf_keras",
}  # adapted frameworks import the others too, so their import shows nothing
_OWN_USES = {"ckpt.api", "ckpt.checkpointer"}
"""Modules whose import shows that the script uses ckpt itself; `ckpt.adapters.*` are others."""


@dataclass
class _Process:
    """What has happened in this process.

    No lock guards it: the hooks assume that one thread at a time calls wrapped methods. Imports in other threads only set
    `uses_ckpt` and add to `printed`.
    """

    id: int = 0
    """The process in which the hooks act; 0 in the fork server."""
    uses_ckpt: bool = False
    """Whether the script itself has imported ckpt, so that the hooks rest."""
    importing: int = 0
    """How many imports of ckpt by the hooks are running."""
    printed: set[str] = field(default_factory=set)
    trainings: int = 0
    """How many training runs have begun, without those inside of another one."""
    is_training: bool = False
    """Whether a training run with a repository is running."""


_process = _Process()


# --- when the hooks act --------------------------------------------------------------------------------------------


def install() -> None:
    """Install the hooks, if `ckpt-run --adapt` has started this process."""
    is_child = os.environ.get(ADAPTED_VARIABLE, str(os.getpid())) != str(os.getpid())
    if os.environ.get(SWITCH) != "on" or is_child or _is_launcher():
        return
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    atexit.register(_report_nothing)
    if _ATTEMPT_VARIABLE in os.environ:
        start_process()


def start_process() -> None:
    """Let the hooks act in this process. The fork server calls this in each rank that it has forked."""
    _process.id = os.getpid()
    os.environ[ADAPTED_VARIABLE] = str(_process.id)


def acts_here() -> bool:
    """Return whether the hooks act in this process: not in its children, and not if the script uses ckpt itself."""
    return _process.id == os.getpid() and not _process.uses_ckpt


def _is_launcher() -> bool:
    """Return whether this process only starts the ranks of a training run."""
    first, original = sys.argv[0], sys.orig_argv
    if first == "-m":
        at = next((i for i, argument in enumerate(original) if argument.startswith("-m")), 0)
        module = original[at][2:] or "".join(original[at + 1 : at + 2])
        return module.startswith(_LAUNCHER_MODULES)
    return os.path.basename(first) in _LAUNCHER_SCRIPTS


# --- messages ------------------------------------------------------------------------------------------------------


def print_once(text: str) -> None:
    """Print a message once, in rank 0, and only in the process in which the hooks act."""
    if _process.id != os.getpid() or text in _process.printed:
        return
    _process.printed.add(text)
    if os.environ.get("RANK", "0") == "0":
        print(f"ckpt: {text}", file=sys.stderr, flush=True)


def print_saves(what: str, url: str, when: str, start: str) -> None:
    """Print where a training run is saved, how often, and from where it continues."""
    print_once(f"{what} saves to {url} {when}, and {start} (--adapt; --adapt=off or {SWITCH}=off turns it off)")


def print_refused(what: str, reason: object) -> None:
    """Print why a training run is not adapted."""
    print_once(f"{what} is not adapted and saves nothing to ckpt: {reason}")


def _report_nothing() -> None:
    """At the end of a script that no hook has adapted, name the frameworks that it has imported."""
    is_known = _process.printed or bool(_LIGHTNING_PACKAGES & sys.modules.keys())
    if not acts_here() or is_known or sys.orig_argv[1:2] == ["-c"]:
        return
    if found := [refusal for refusal in REFUSALS if refusal.module in sys.modules]:
        print_once("--adapt has found nothing to save. " + "; ".join(f"{refusal.name}: {refusal.reason}" for refusal in found))


def _first_optimizer_step(torch_optimizer: ModuleType) -> None:
    """Print at the first step of an optimizer of torch that a loop of the script is not adapted."""

    def notice(*_: object) -> None:
        handle.remove()
        if acts_here() and not _process.printed and not (_LIGHTNING_PACKAGES | {"keras"}) & sys.modules.keys():
            name = "accelerate" if "accelerate" in sys.modules else "torch"
            print_refused(f"this loop over {name}", next(r.reason for r in REFUSALS if r.name == name))

    handle = torch_optimizer.register_optimizer_step_post_hook(notice)


# --- what wrapped methods use --------------------------------------------------------------------------------------


@contextlib.contextmanager
def importing_ckpt() -> Iterator[None]:
    """Mark imports of ckpt as those of the hooks; other ones show that the script uses ckpt itself."""
    _process.importing += 1
    try:
        yield
    finally:
        _process.importing -= 1


_MOST_TRAININGS = 8
"""How many training runs of a script get a repository."""


@contextlib.contextmanager
def training(what: str) -> Iterator[str | None]:
    """Give a training run of this process its repository: its URL, or None if it is not adapted.

    The first training run has that at CKPT_DIR, the second that with the suffix "-2", and so on: a script that runs again
    then finds each of its training runs as it was.
    """
    if _process.is_training:
        print_refused(what, "it runs inside of another training run")
        yield None
        return
    _process.trainings += 1
    if _process.trainings > _MOST_TRAININGS:
        print_refused(
            what, f"only the first {_MOST_TRAININGS} training runs of a script are; later ones begin again after a restart"
        )
        yield None
        return
    path, mark, query = os.environ["CKPT_DIR"].partition("?")
    suffix = "" if _process.trainings == 1 else f"-{_process.trainings}"
    _process.is_training = True
    try:
        yield path.rstrip("/") + suffix + mark + query
    finally:
        _process.is_training = False


# --- the import of a framework -------------------------------------------------------------------------------------


class _Finder:
    """A meta path finder that lets the others find a module, and applies the hooks after its import."""

    def __init__(self) -> None:
        self._actions: dict[str, Callable[[ModuleType], None]] = {"torch.optim.optimizer": _first_optimizer_step}
        self._actions |= {hook.module: functools.partial(_wrap, hook) for hook in HOOKS}
        self._actions |= {r.module: functools.partial(_refuse, r) for r in REFUSALS if r.module in _REFUSED_AT_IMPORT}
        self._running: set[tuple[int, str]] = set()
        """Thread and module of each search that runs now, so that a finder that searches again does not reach this one."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _OWN_USES or name.startswith("ckpt.adapters."):
            _note_own_use()
        call = get_ident(), name
        if name not in self._actions or call in self._running:
            return None
        self._running.add(call)
        try:
            for finder in sys.meta_path:
                find = None if finder is self else getattr(finder, "find_spec", None)
                if find is not None and (spec := find(name, path, target)) is not None:
                    _act_after_import(spec, self._actions)
                    return spec  # type: ignore[no-any-return]
        finally:
            self._running.discard(call)
        return None


def _act_after_import(spec: ModuleSpec, actions: dict[str, Callable[[ModuleType], None]]) -> None:
    """Let the loader of a module take its action from `actions` and call it, after it has executed the module.

    A spec that is only looked at, by importlib.util.find_spec, changes nothing.
    """
    loader: Any = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None:  # a folder of this name without __init__.py
        return

    def exec_module(module: ModuleType) -> None:
        if module.__name__ != spec.name:  # another module of one zip file: its modules share a loader
            execute(module)
            return
        if vars(loader).get("exec_module") is exec_module:
            del loader.exec_module
        execute(module)
        if (action := actions.pop(spec.name, None)) is None:
            return
        try:
            action(module)
        except Exception as error:  # the framework differs from the one that is known
            what = f"this version differs ({type(error).__name__}: {error})"
            print_refused(spec.name, f"{what}: install a version that ckpt supports")

    # Python leaves frames with these names out of the traceback of a failed import, as it does its own.
    exec_module.__code__ = exec_module.__code__.replace(
        co_filename="<frozen importlib._bootstrap>", co_name="_call_with_frames_removed"
    )
    loader.exec_module = exec_module


def _wrap(hook: Hook, module: ModuleType) -> None:
    owner = module
    *names, method = hook.method.split(".")
    for name in names:
        owner = getattr(owner, name)
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not acts_here():
            return original(*args, **kwargs)
        try:
            with importing_ckpt():
                where, _, name = hook.function.partition(":")
                function = getattr(importlib.import_module(where), name)
        except Exception as error:  # ckpt is not installed for this Python, or the framework is too old
            if isinstance(error, MemoryError | RecursionError) or getattr(error, "errno", None) is not None:
                raise  # lack of files or memory: without ckpt, the training would silently start from the beginning
            print_refused(hook.name, f"{type(error).__name__}: {error}")
            return original(*args, **kwargs)
        return function(original, *args, **kwargs)

    setattr(owner, method, wrapped)


def _refuse(refusal: Refusal, module: ModuleType) -> None:
    print_refused(refusal.name, refusal.reason)


def _note_own_use() -> None:
    """Let the hooks rest if the import of ckpt that runs now is one of the script, not of an entry point."""
    if _process.importing or _process.uses_ckpt:
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("importlib/metadata/__init__.py"):
            return
        frame = frame.f_back  # type: ignore[assignment]
    print_once("this script uses ckpt itself, so --adapt leaves it alone")
    _process.uses_ckpt = True
