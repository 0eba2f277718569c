"""Checkpoint manager of torchtitan that saves to and resumes from a ckpt repository.

In the function that returns the configuration:

    from ckpt.adapters.torchtitan import CkptManager
    checkpoint=CkptManager.Config(enable=True, interval=100, keep_latest_k=3)

Without a change of the configuration:

    torchtitan --override.imports ckpt.adapters.torchtitan.use_ckpt --checkpoint.enable
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, CheckpointManager
from torchtitan.config.override import override
from torchtitan.tools import filesystem

from ckpt.adapters.torchtitan_state import DataloaderPosition, ShardedState, ranks_with_names
from ckpt.api import load_newest, load_step
from ckpt.checkpointer import Checkpointer
from ckpt.errors import FormatError, LeafNotFound, StepNotFound
from ckpt.groups import as_group
from ckpt.loading.rank_agreement import LoadRequest
from ckpt.repository.repository import DIRECTORY_VARIABLE, REPOSITORY_FOLDER, Repository, open_repository
from ckpt.state.stateful import RandomState
from ckpt.storage.base.errors import InvalidArgument

_RANDOM = "random"
_DEFAULT_FOLDER = "checkpoint"


class CkptManager(CheckpointManager):  # type: ignore[misc]  # mypy does not look into torchtitan
    """Saves a torchtitan training to a ckpt repository, and loads it on any parallelism.

        checkpoint=CkptManager.Config(enable=True, interval=100, keep_latest_k=3)

    config, components: given by torchtitan, which makes the manager from its `Config`.

    The options are those of torchtitan's CheckpointManager, with the same meaning. `folder` may also be a URL; where it is
    not set, CKPT_DIR names the repository if that is set. `async_mode` is "async" by default: a save copies the state and
    writes in the background. "disabled" waits until the step is committed. "async_with_pinned_mem" copies parameters and
    moments while the next forward and backward run, and the optimizer waits for that.

    Besides what torchtitan saves, a step has the random generators of each rank. The position in the data is not pickled.

    Without a step of ckpt, training starts as with CheckpointManager: from its own steps in `folder`, where ckpt then saves
    to the folder `ckpt`, or from `initial_load_path`, which may be a repository, too.

    Raises:
        InvalidArgument: `exclude_from_loading` names a state that does not exist.
        LeafMismatch: At a load, if the saved position in the data is one of another number of data-parallel ranks.
        LeafNotFound: At a load, if the step has only the model, or lacks a tensor of the model.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The options of CheckpointManager; `async_mode` is "async" by default."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"

    def __init__(self, config: Any, **components: Any) -> None:
        super().__init__(replace(config, async_mode="disabled", keep_latest_k=0), **components)
        if not self.enable:
            return
        self._is_blocking = config.async_mode == "disabled"
        if config.folder == _DEFAULT_FOLDER and (named := os.environ.get(DIRECTORY_VARIABLE)):
            self.folder = named
        self._url = self._repository_url()
        self._entries = _entries(self.states, components["model_parts"])
        self._saver: Checkpointer | None = None
        if not self.load_only:
            self._saver = Checkpointer(self._url, every=None, keep=config.keep_latest_k or None)
            if config.async_mode == "async_with_pinned_mem":
                self._saver.attach(*components["optimizers"])

    def _repository_url(self) -> str:
        """Return `folder`, or a new folder in it if torchtitan's own manager has saved steps there."""
        if _committed_steps(open_repository(self.folder)) or self._find_load_step() == -1:
            return str(self.folder)
        return str(filesystem.join(self.folder, REPOSITORY_FOLDER))

    def __del__(self) -> None:
        """Do nothing: an unclosed manager must not wait for other ranks when the process ends."""

    # --- saving ------------------------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._saver is None:
            return False
        if not self._should_save(curr_step, last_step):
            self._saver.step(curr_step, self._entries)
            return False
        if last_step:
            self._save_last_step(curr_step)
            return True
        handle = self._saver.save(curr_step, self._entries, blocking=self._is_blocking)
        self.save_future = None if self._is_blocking else handle
        return True

    def _save_last_step(self, curr_step: int) -> None:
        assert self._saver is not None
        if self.last_save_in_hf:
            self._saver.wait()
            super()._save_last_step(curr_step)
            return
        state = self._entries
        if self.last_save_model_only:
            state = {MODEL: self._entries[MODEL].converted(self.export_dtype)}
        self._saver.save(curr_step, state, blocking=True)
        self.save_future = None

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None
        self.save_future.result()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: with async_with_pinned_mem, the attached optimizers wait in their step."""

    def _close(self) -> None:
        if self._saver is not None:
            self._saver.close()

    # --- loading -----------------------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        if unknown := set(self.exclude_from_loading) - self.states.keys():
            raise InvalidArgument(
                f"checkpoint.exclude_from_loading has {min(unknown)!r}, which is not a state; use some of {sorted(self.states)}"
            )
        repository = open_repository(self._url)
        steps = _committed_steps(repository)
        if not steps or (step != -1 and step not in steps):
            loaded: bool = super()._load(step)
            return loaded
        is_seed = step == 0 or steps == [0]
        names = [MODEL] if is_seed else [name for name in self._entries if name not in self.exclude_from_loading]
        self._fill(names, None if step == -1 else step)
        return True

    def _fill(self, names: Collection[str], step: int | None) -> None:
        """Load the entries of these names from the repository."""
        state = {name: self._entries[name] for name in names}
        try:
            if self._saver is not None:
                self._saver.restore(state, step=step)
            else:
                _load_only(open_repository(self._url), state, step)
        except LeafNotFound as error:
            if any(str(error).startswith(f"leaf {name} of ") for name in state if name != MODEL):
                raise LeafNotFound(
                    f"the step in {self._url} has only the model: set checkpoint.load_step to an earlier one, or name the rest "
                    f"in checkpoint.exclude_from_loading ({error})"
                ) from error
            raise

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load `initial_load_path`, or a step that torchtitan's CheckpointManager has saved."""
        if from_hf or filesystem.isfile(filesystem.join(checkpoint_id, ".metadata")):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        excluded = () if OPTIMIZER in state_dict else self._entries.keys() - {MODEL}
        names = self._entries.keys() - excluded - set(self.exclude_from_loading)
        _load_only(open_repository(checkpoint_id), {name: self._entries[name] for name in names}, None)


def _entries(states: dict[str, Any], model_parts: list[Any]) -> dict[str, Any]:
    """Return the entries of a step: torchtitan's states, of which some are wrapped, and the random generators."""
    model = states[MODEL]
    ranks = ranks_with_names(model.state_dict())
    wrapped: dict[str, Any] = {
        MODEL: ShardedState(model, ranks, model_parts),
        OPTIMIZER: ShardedState(states[OPTIMIZER], ranks),
    }
    if states.get(DATALOADER) is not None:
        wrapped[DATALOADER] = DataloaderPosition(states[DATALOADER])
    return {**{name: wrapped.get(name, value) for name, value in states.items() if value is not None}, _RANDOM: RandomState()}


def _committed_steps(repository: Repository) -> list[int]:
    try:
        return repository.steps()
    except (StepNotFound, FormatError):
        return []


def _load_only(repository: Repository, state: dict[str, Any], step: int | None) -> None:
    """Load a step of a repository to which this training run does not write."""
    request = LoadRequest(state, group=as_group("auto"))
    if step is not None:
        load_step(repository, step, request)
    elif load_newest(repository, False, request) is None:
        raise repository.no_step_error()


@override(target=CheckpointManager.Config, description="checkpoints in a ckpt repository")  # type: ignore[untyped-decorator]
def use_ckpt(config: Any) -> Any:
    """Return the configuration of a `CkptManager` with the same options, for torchtitan's `--override.imports`.

    config: the configuration of a CheckpointManager.
    """
    if isinstance(config, CkptManager.Config):
        return config
    return CkptManager.Config(**{field.name: getattr(config, field.name) for field in fields(config) if field.init})
