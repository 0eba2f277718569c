"""The best model of a run by a Trainer, of which a repository of its own has a copy if only the newest steps are kept."""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import Any

from ckpt.adapters.transformers_model import model_state
from ckpt.api import load_step
from ckpt.checkpointer import Checkpointer
from ckpt.errors import StepNotFound
from ckpt.groups import as_group
from ckpt.loading.rank_agreement import LoadRequest
from ckpt.repository.repository import Url, open_repository
from ckpt.storage.base.errors import IntegrityError, InvalidArgument
from ckpt.support.user_warning import warn_user

_COPIES = 2
"""A kill may leave the copy of a best model whose step is not complete. The previous step then needs the previous copy."""


class BestModel:
    """Which step has the best model of those that are saved, and the copies of it.

    trainer: the Trainer, whose state names the step of the best evaluation.
    url: the repository of the training, which `saver` writes.
    limit: how many of the newest steps are kept there. Without a limit, the best model is that of its step.
    """

    def __init__(self, trainer: Any, url: Url, saver: Checkpointer, limit: int | None) -> None:
        self._trainer, self._url, self._steps_saver, self._limit = trainer, url, saver, limit
        self._saver: Checkpointer | None = None
        self.step: int | None = None
        """The step of the best model that is saved."""
        self._is_lost = False
        """Whether the best model of the step from which the training continues is gone."""

    def close(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Wait until the last copy is committed."""
        if self._saver is not None:
            self._saver.__exit__(kind, error, tb)

    def note_step(self, step: int) -> None:
        """Note the step that is saved next, if its model is the best so far."""
        if getattr(self._trainer.state, "best_global_step", None) == step:
            self.step = step

    def step_saved(self, step: int) -> None:
        """Copy the model of the step that is being saved, if it is the best so far."""
        if step == self.step and self._limit is not None:
            self._copy(step)
        if self.step:
            self._trainer.state.best_model_checkpoint = self._text()

    def resume(self, step: int | None) -> None:
        """Continue with the best model of step `step`, if it is one. This changes the model of the Trainer.

        A kill between the commit of a step and that of its copy leaves a best model without a copy. It is copied now, because
        its step is deleted later. If the best model is gone, the best one of the further steps takes its place.

        A kill between the commit of a copy and that of its step leaves a newer copy, which no step names. The copy of `step` is
        then saved again: it becomes the newest one, and the other one is the first that is deleted.
        """
        self.step, self._is_lost = step, False
        if step and self._limit is not None and step != self._newest_copy():
            try:
                self._load_for_copy(step)
            except (StepNotFound, IntegrityError):
                warn_user(
                    f"the best model, of step {step}, is in neither {self._copies_url()} nor {self._url}: the best one "
                    "of the next steps takes its place"
                )
                self.step, self._is_lost = None, True
            else:
                self._copy(step)
        self.update_trainer_state()

    def update_trainer_state(self) -> None:
        """Name the best model in the state of the Trainer. Some versions of transformers read that state after `resume`."""
        state = self._trainer.state
        if self._is_lost:
            state.best_global_step = state.best_metric = None
        elif self.step:
            state.best_model_checkpoint = self._text()

    def load(self) -> bool:
        """Load the best model at the end of the training; return whether it was saved here."""
        step = self.step
        if not step:
            return False
        self._trainer.state.best_model_checkpoint = None  # the Trainer would look for a folder of this name
        self._steps_saver.wait()
        if self._saver is not None:
            self._saver.wait()
        try:
            repository = self._steps_saver.repository if self._limit is None else open_repository(self._copies_url())
            load_step(repository, step, self._request())
        except StepNotFound:  # saved without a limit
            self._load_from_steps(step)
        return True

    def publish(self) -> None:
        """Name the best step in the state of the Trainer, after the training."""
        if self.step:
            self._trainer.state.best_model_checkpoint = self._text()

    def _request(self) -> LoadRequest:
        return LoadRequest({"train": model_state(self._trainer)}, group=as_group())

    def _load_from_steps(self, step: int) -> None:
        load_step(self._steps_saver.repository, step, self._request())

    def _newest_copy(self) -> int | None:
        repository = open_repository(self._copies_url())
        newest = repository.latest() if repository.step_numbers() else None
        return None if newest is None else newest.step

    def _load_for_copy(self, step: int) -> None:
        """Load the best model from its copy, with which the next copies continue, or else from its step."""
        if step in open_repository(self._copies_url()).step_numbers():
            with suppress(IntegrityError):
                self._open_saver().restore({"train": model_state(self._trainer)}, step=step)
                return
        self._load_from_steps(step)

    def _copy(self, step: int) -> None:
        self._open_saver().save(step, {"train": model_state(self._trainer)})

    def _open_saver(self) -> Checkpointer:
        if self._saver is None:
            self._saver = Checkpointer(self._copies_url(), every=None, keep=_COPIES)
        return self._saver

    def _copies_url(self) -> Url:
        if not isinstance(self._url, (str, os.PathLike)):
            raise InvalidArgument("save_total_limit with a best model needs a URL as text in ckpt=, for a second repository")
        path, mark, query = str(self._url).partition("?")
        return path.rstrip("/") + "-best" + mark + query

    def _text(self) -> str:
        return f"{self._url if self._limit is None else self._copies_url()} (step {self.step})"
