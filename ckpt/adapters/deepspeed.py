"""`engine.save_checkpoint` and `engine.load_checkpoint` of DeepSpeed, with a ckpt repository in place of folders.

Usage:

    from ckpt.adapters.deepspeed import attach
    engine, _, _, _ = deepspeed.initialize(model=model, config=config)
    attach(engine, "/data/run")

DeepSpeed's CheckpointEngine is not used: it gets one dictionary of pickled objects for each rank, whose flat partitions fit
only the same number of ranks and the same ZeRO stage.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt.adapters.deepspeed_state import EngineState, only_step_changes_weights
from ckpt.api import load_step
from ckpt.checkpointer import Checkpointer
from ckpt.errors import FormatError, LeafNotFound, StepNotFound
from ckpt.groups import Group, as_group
from ckpt.groups.base import SingleProcessGroup
from ckpt.loading.rank_agreement import LoadRequest, broadcast_from_rank_0, is_true_on_rank_0
from ckpt.repository.repository import Repository, Url, open_repository
from ckpt.repository.retention import Keep
from ckpt.saving.handle import SaveHandle
from ckpt.storage.base.errors import CkptError, InvalidArgument
from ckpt.support.validation import check_switch
from ckpt.tiers.tier_spec import Tier

__all__ = ["AttachedEngine", "EngineState", "attach"]

log = logging.getLogger("ckpt")

_DEFAULT_TAG = re.compile(r"global_step(\d+)")


def attach(
    engine: Any,
    url: Url | None = None,
    *,
    defer: bool = True,
    keep: int | Keep | None = None,
    tiers: Sequence[Tier] = (),
    **options: Any,
) -> AttachedEngine:
    """Let `save_checkpoint` and `load_checkpoint` of a DeepSpeed engine use a repository, and return the object that does it.

        attach(engine, "/data/run", keep=3)

    engine: what `deepspeed.initialize` returns. All ranks call this.
    url: the repository. None means the `save_dir` and `load_dir` that the script gives; otherwise these are not used.
    defer: whether a save may copy the weights and moments during the next forward and backward; `engine.step` then waits for
        the copy. Use False if a program changes them by other means during a save: see `ckpt.Checkpointer.attach`.
    keep, tiers, options: as for `ckpt.Checkpointer`.

    A save is step `engine.global_steps`. It runs in the background; the next save and the end of the program wait for it. Each
    rank saves its partition, under the names of the whole model: any number of ranks, and any ZeRO stage, can load it. A step
    has the master weights, the optimizer, the LR scheduler, the counters, the loss scale, the random generators of each rank,
    and the `client_state` of rank 0. `load_checkpoint` returns a name of the step and that `client_state`, or (None, None)
    where nothing is saved. A folder that DeepSpeed has saved is loaded by DeepSpeed, if the repository has no step yet, or none
    with the tag, or if only the weights are loaded (`load_module_only`).

    Raises:
        InvalidArgument: The engine has pipeline, tensor or expert parallelism, partitions on NVMe, or another feature whose
            state ckpt does not save; or an argument of `save_checkpoint` or `load_checkpoint` is not supported.
        LeafMismatch: At a load, the step does not fit the engine; as for `EngineState`.
        CkptError: As for `ckpt.Checkpointer`.
    """
    check_switch("defer", defer)
    return AttachedEngine(engine, url, defer, keep=keep, tiers=tiers, **options)


class AttachedEngine:
    """The saves and loads of a DeepSpeed engine; `attach` makes it."""

    def __init__(self, engine: Any, url: Url | None, defer: bool, **options: Any) -> None:
        EngineState(engine)  # refuses an engine that can't be saved
        self._defers = defer and only_step_changes_weights(engine)
        self._engine, self._url, self._options = engine, url, options
        self._savers: dict[str, Checkpointer] = {}
        self._load_checkpoint = engine.load_checkpoint
        self.last_save: SaveHandle | None = None
        """The handle of the newest save."""
        engine.save_checkpoint, engine.load_checkpoint = self.save_checkpoint, self.load_checkpoint

    # --- what the script calls ---------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: object = None, client_state: dict[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Save the step `engine.global_steps` in the background, and return True, as DeepSpeed does."""
        if not save_latest:
            raise InvalidArgument("save_latest=False: a repository has no file `latest`; give load_checkpoint the tag to load")
        engine = self._engine
        step = engine.global_steps
        if engine.micro_steps % engine.gradient_accumulation_steps():
            log.warning(
                "step %d is saved between two updates of the optimizer, without the gradients of its batches: call "
                "save_checkpoint where engine.micro_steps is a multiple of gradient_accumulation_steps", step,
            )  # fmt: skip
        state = EngineState(
            engine, exclude_frozen=exclude_frozen_parameters, tag=f"global_step{step}" if tag is None else str(tag),
            client_state=dict(client_state or {}),
        )  # fmt: skip
        self.last_save = self._saver(save_dir).save(step, state)
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: object = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """Load a step into the engine, by default the newest, and return its name and the client_state."""
        if custom_load_fn is not None:
            raise InvalidArgument("custom_load_fn gets a file of DeepSpeed, which ckpt does not have: remove it")
        if self.last_save is not None:
            self.last_save.require_staged()  # it may still read what the load writes
        if self._is_loaded_by_deepspeed(load_dir, tag, load_module_only):
            found: tuple[str | None, dict[str, Any] | None] = self._load_checkpoint(
                load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
            )
            return found
        parts = {"model"} if load_module_only else {"model", "engine", "random"}
        if load_optimizer_states and not load_module_only:
            parts.add("optimizer")
        if load_lr_scheduler_states and not load_module_only:
            parts.add("lr_scheduler")
        saver = self._saver(load_dir)
        step = None if tag is None else self._step_of_tag(saver, str(tag))
        _, start = saver.restore(EngineState(self._engine, parts=parts, strict=load_module_strict), step=step)
        if start == 0:
            log.warning("%s has no step yet, so nothing is loaded", saver.repository.url)
            return None, None
        client_state = _read(saver.repository, start - 1, "client_state.*", self._group()).get("client_state", {})
        return f"{saver.repository.url}/global_step{start - 1}", client_state

    def _is_loaded_by_deepspeed(self, folder: str | os.PathLike[str], tag: object, weights_alone: bool) -> bool:
        """Return whether to load a folder that DeepSpeed has saved, because the repository has no step to continue from.

        This is as rank 0 sees it: another host may lack the folder. All ranks call this together.
        """
        if not is_true_on_rank_0(self._group(), lambda: _is_deepspeed_folder(folder, tag)):
            return False
        if weights_alone or (self._url is None and not is_true_on_rank_0(self._group(), lambda: _is_repository(folder))):
            return True
        saver = self._saver(folder)
        saver._wait_ignoring_errors()  # a running save may be that of the first step
        return not is_true_on_rank_0(self._group(), lambda: _has_step(saver.repository, tag))

    def close(self) -> None:
        """Wait for the running saves, and release the repository; the engine can't save any more."""
        for saver in self._savers.values():
            saver.close()

    # --- the repository ----------------------------------------------------------------------------------------

    def _saver(self, folder: str | os.PathLike[str]) -> Checkpointer:
        url: Url = os.fspath(folder) if self._url is None else self._url
        key = str(url)
        if key not in self._savers:
            saver = self._savers[key] = Checkpointer(url, every=None, **self._options)
            if self._defers:
                with suppress(CkptError):  # an optimizer of a user, which has no hooks
                    saver.attach(self._engine.optimizer)
        return self._savers[key]

    def _group(self) -> Group:
        return as_group(self._options.get("group", "auto"))

    def _step_of_tag(self, saver: Checkpointer, tag: str) -> int:
        """Return the newest step that was saved with this tag. A tag `global_step7` is that of step 7 by default.

        Rank 0 looks for it. All ranks call this together.
        """
        saver._wait_ignoring_errors()  # a running save may be the one with this tag
        return int(broadcast_from_rank_0(self._group(), lambda: str(_find_tag(saver.repository, tag))))


def _is_repository(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a repository, which DeepSpeed may have saved to as well."""
    try:
        open_repository(folder).check()
    except (StepNotFound, FormatError):
        return False
    return True


def _has_step(repository: Repository, tag: object) -> bool:
    """Return whether a repository has a step with this tag, or any step if the tag is None."""
    try:
        if tag is None:
            return repository.latest() is not None
        _find_tag(repository, str(tag))
    except StepNotFound:
        return False
    return True


def _find_tag(repository: Repository, tag: str) -> int:
    steps = repository.order().newest_first()
    default = _DEFAULT_TAG.fullmatch(tag)
    if default is not None and int(default[1]) in steps:
        return int(default[1])
    for step in steps:
        with suppress(StepNotFound):  # it has been deleted meanwhile
            if _read(repository, step, "engine.tag").get("engine", {}).get("tag") == tag:
                return step
    raise StepNotFound(
        f"no step of {repository.url} has the tag {tag!r}; give the tag of one of the steps {steps}, or tag=None for the newest"
    )


def _read(repository: Repository, step: int, pattern: str, group: Group | None = None) -> dict[str, Any]:
    """Return the part of the state of a step whose names match. group: the ranks that call this together; None for one rank."""
    request = LoadRequest(only=pattern, group=group or SingleProcessGroup())
    try:
        found: dict[str, Any] = load_step(repository, step, request)
    except LeafNotFound:
        return {}
    return found


def _is_deepspeed_folder(folder: str | os.PathLike[str], tag: object) -> bool:
    """Return whether a folder has a checkpoint that DeepSpeed itself has saved."""
    if "://" in str(folder):
        return False
    pattern = "*/*_states.pt" if tag is None else f"{glob.escape(str(tag))}/*_states.pt"
    return next(Path(folder).glob(pattern), None) is not None
