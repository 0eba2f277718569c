"""The class CheckpointManager, which has the calls of Orbax's CheckpointManager and stores its steps with ckpt.

Arguments are those of `orbax.checkpoint.args`. They are read by their attributes, so that this file does not import Orbax.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from types import TracebackType
from typing import Any, Self

import ckpt
from ckpt.api import load_step
from ckpt.errors import StepNotFound
from ckpt.groups import as_group
from ckpt.loading.rank_agreement import LoadRequest
from ckpt.repository.repository import Url
from ckpt.saving.handle import SaveHandle
from ckpt.state.name_patterns import children
from ckpt.storage.base.errors import CkptError, InvalidArgument

_DEFAULT_ITEM = "default"
_METRICS = "metrics"
_REFUSED_OPTIONS = {
    "best_fn": "ckpt keeps the newest steps: save the best one to a repository of its own",
    "keep_time_interval": "use keep_period",
    "should_keep_fn": "use keep_period, or save such steps to a repository of their own",
    "todelete_subdir": "ckpt deletes the steps that it does not keep",
    "todelete_full_path": "ckpt deletes the steps that it does not keep",
    "save_decision_policy": "use save_interval_steps, save_on_steps or should_save_fn",
    "preservation_policy": "use max_to_keep and keep_period",
    "read_only": "use ckpt.load",
    "async_options.post_finalization_callback": "call it after wait_until_finished",
    "multiprocessing_options.active_processes": "give the ranks that save as group=",
}
_REFUSED_RESTORE_ARGS = ("restore_args", "transforms", "fallback_sharding")


class CheckpointManager:
    """Saves and restores as Orbax's CheckpointManager does, in the background, to a repository of ckpt.

        manager = CheckpointManager("/data/run", options=ocp.CheckpointManagerOptions(save_interval_steps=100, max_to_keep=3))
        state = manager.restore(None, args=ocp.args.StandardRestore(state))
        manager.save(step, args=ocp.args.StandardSave(state))

    directory: the URL of the repository, as for `ckpt.save`.
    options: Orbax's CheckpointManagerOptions. The manager uses save_interval_steps, save_on_steps, should_save_fn, max_to_keep,
        keep_period, prevent_write_metrics and enable_async_checkpointing. keep_period keeps multiples as in Orbax, and where a
        multiple was not saved, the first step after it, as `ckpt.Keep(every=)` does. Names of directories, and how files are
        written and removed, do not apply. All other options are refused.
    item_names: not needed; the names are those of the arguments.
    further: as for `ckpt.Checkpointer`, such as group and tiers.

    Raises:
        InvalidArgument: An option has no counterpart here.
        CkptError: As of `ckpt.Checkpointer`.
    """

    def __init__(self, directory: Url, options: Any = None, *, item_names: object = None, **further: Any) -> None:
        for name, instead in _REFUSED_OPTIONS.items():
            if reduce(lambda found, part: getattr(found, part, None), name.split("."), options):
                raise InvalidArgument(f"options.{name} has no counterpart in ckpt: {instead}")
        self._options = options
        self.directory = directory
        self._checkpointer = ckpt.Checkpointer(directory, every=None, keep=_keep(options), **further)
        self._group = further.get("group", "auto")
        self._handle: SaveHandle | None = None
        self._restored: int | None = None
        """The step that `restore` has loaded, until the next save."""

    def save(self, step: int, args: Any = None, *, metrics: Any = None, force: bool = False) -> bool:
        """Save the items of `args` as step `step`, if it is due or `force` is True; return whether it saves.

        args: StandardSave, PyTreeSave, JsonSave, ArraySave, grain's CheckpointSave, or a Composite of them.
        metrics: a dict of numbers that is stored with the step.

        Raises:
            InvalidArgument: `args` has another form, or the step exists, unless it was saved after the restored one: then it is
                replaced.
            CkptError: As of `ckpt.Checkpointer.save`.
        """
        items = _items_of(args)
        if not force and not self.should_save(step):
            return False
        if step in self.all_steps():
            self.wait_until_finished()  # a save that still runs may abandon the step
            if not self._is_abandoned(step):
                raise InvalidArgument(f"step {step} exists in {self.directory}: give a larger number")
        has_metrics = metrics is not None and not getattr(self._options, "prevent_write_metrics", False)
        state = {**items, _METRICS: metrics} if has_metrics else items
        self._handle = self._checkpointer.save(
            step, state, blocking=not getattr(self._options, "enable_async_checkpointing", True)
        )
        self._restored = None
        return True

    def restore(self, step: int | None = None, args: Any = None) -> Any:
        """Return the items of a step, each filled into the item of its argument; the newest step if `step` is None.

        args: StandardRestore, PyTreeRestore, JsonRestore, ArrayRestore, grain's CheckpointRestore, or a Composite of them. An
            item may have a jax.ShapeDtypeStruct, with a sharding, in place of an array. Without an item, or without `args`,
            new values are made.

        Returns:
            With a Composite, a Composite of its items. With other arguments, the item. Without `args`, a dict of all items of
            the step, or the item if it was saved without a Composite.

        Raises:
            FileNotFoundError: `step` is None, and the repository has no step.
            InvalidArgument: `args` has another form.
            CkptError: As of `ckpt.load`.
        """
        number = self.latest_step() if step is None else step
        if number is None:
            raise FileNotFoundError(f"no step in {self.directory}: check the directory, or save a step first")
        self.wait_until_finished()
        if args is None:
            found = self._load(number)
            found.pop(_METRICS, None)
        else:
            found = self._restore_items(number, _items_of(args, _REFUSED_RESTORE_ARGS))
        self._checkpointer.restore({}, step=number)  # the next save continues from this step
        self._restored = number
        if _is_composite(args):
            return type(args)(**found)
        return found[_DEFAULT_ITEM] if list(found) == [_DEFAULT_ITEM] else found

    def _restore_items(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        like = {name: item for name, item in items.items() if item is not None}
        found: dict[str, Any] = self._load(step, like) if like else {}
        if new := [name for name in items if name not in like]:
            found = {**found, **self._load(step, only=new)}
        return {name: found[name] for name in items}

    def _load(self, step: int, like: dict[str, Any] | None = None, only: list[str] | None = None) -> dict[str, Any]:
        """Load a step from the tier that has it, by the ranks that save together."""
        request = LoadRequest(like, only, group=as_group(self._group), bypass_cache=True)
        found: dict[str, Any] = load_step(self._checkpointer.repository, step, request)
        return found

    def should_save(self, step: int) -> bool:
        """Return whether a step is due: it is larger than the newest one, and the options select it, or it is the first."""
        latest = self._restored if self._restored is not None else self.latest_step()
        if latest is not None and step <= latest:
            return False
        decide = getattr(self._options, "should_save_fn", None)
        if decide is not None:
            return bool(decide(step, latest))
        on_steps = getattr(self._options, "save_on_steps", None)
        return latest is None or step % getattr(self._options, "save_interval_steps", 1) == 0 or step in (on_steps or ())

    def _is_abandoned(self, step: int) -> bool:
        """Return whether an existing step is abandoned, or will be by the next save, because it came after the restored one."""
        order, restored = self._checkpointer.repository.order(), self._restored
        if restored is None:
            return step in order.abandoned
        history = order.history()
        later = history[history.index(restored) + 1 :] if restored in history else history
        return step > restored and (step in later or step in order.abandoned)

    def all_steps(self, read: bool = False) -> list[int]:
        """Return the numbers of the steps, also of one that is being saved; the newest last. read: no effect."""
        saving = self._handle.step if self._handle is not None and not self._handle.done() else None
        try:
            steps = self._checkpointer.repository.steps()
        except StepNotFound:
            steps = []
        return steps if saving is None else [*(step for step in steps if step != saving), saving]

    def latest_step(self) -> int | None:
        """Return the number of the newest step, None if there is none."""
        return next(reversed(self.all_steps()), None)

    def metrics(self, step: int) -> Any:
        """Return the metrics that were saved with a step, None if there were none."""
        repository = self._checkpointer.repository
        try:
            entries = dict(children(repository[step].tree(), ""))
        except StepNotFound:
            return None
        return load_step(repository, step, LoadRequest(only=_METRICS))[_METRICS] if _METRICS in entries else None

    def reload(self) -> None:
        """Do nothing: the list of steps is read at each call."""

    def wait_until_finished(self) -> None:
        """Wait for saves in the background, and raise SaveFailed for one that failed."""
        self._checkpointer.wait()

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is running."""
        return self._handle is not None and not self._handle.done()

    def check_for_errors(self) -> None:
        """Raise SaveFailed if a save in the background has failed."""
        if self._handle is not None and self._handle.done():
            self._checkpointer.wait()

    def close(self) -> None:
        """Wait for saves, and release the repository."""
        self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self.close()
        except CkptError:
            if error is None:
                raise


def _keep(options: object) -> ckpt.Keep | None:
    last = getattr(options, "max_to_keep", None)
    return None if last is None else ckpt.Keep(last, getattr(options, "keep_period", None))


def _is_composite(args: object) -> bool:
    return isinstance(args, Mapping)


def _items_of(args: Any, refused: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the items of save or restore arguments by name."""
    arguments = dict(args.items()) if _is_composite(args) else {_DEFAULT_ITEM: args}
    for name, argument in arguments.items():
        if not hasattr(argument, "item"):
            raise InvalidArgument(f"args of {name}: {argument!r:.40} has no item: use those of orbax.checkpoint.args")
        for option in refused:
            if getattr(argument, option, None):
                raise InvalidArgument(
                    f"args of {name}: {option} has no counterpart in ckpt: give an item with a jax.ShapeDtypeStruct (sharding=)"
                )
    if _METRICS in arguments:
        raise InvalidArgument(f"args: the name {_METRICS} is that of metrics=: rename the item")
    return {name: argument.item for name, argument in arguments.items()}
