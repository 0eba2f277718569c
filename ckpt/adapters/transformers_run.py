"""One call of `CheckpointedTrainer.train`: its saves, and the step from which it resumes."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from ckpt.adapters.epoch_random import PERSISTENT_WORKERS
from ckpt.adapters.torch import ModelState
from ckpt.adapters.transformers_best import BestModel
from ckpt.adapters.transformers_data import DataPosition
from ckpt.adapters.transformers_deepspeed import only_step_changes_weights, skipped_engine_loads
from ckpt.adapters.transformers_end import reason_of_end
from ckpt.adapters.transformers_epochs import CAN_CHOOSE_POSITION, EpochEnd
from ckpt.adapters.transformers_folder import newest_folder_of_trainer
from ckpt.adapters.transformers_model import model_state
from ckpt.adapters.transformers_progress import TrainerProgress, samples_in_batch
from ckpt.adapters.trl_samples import GeneratedSamples
from ckpt.api import load_newest
from ckpt.checkpointer import Checkpointer
from ckpt.groups import as_group
from ckpt.loading.rank_agreement import LoadRequest
from ckpt.repository.damage_registry import mark_damaged_in_all_tiers
from ckpt.repository.repository import DIRECTORY_VARIABLE, REPOSITORY_FOLDER, Url, resolve_url
from ckpt.state.name_patterns import children
from ckpt.storage.base.errors import IntegrityError, InvalidArgument
from ckpt.support.path_kinds import is_file
from ckpt.support.user_warning import warn_user
from ckpt.training.save_interval import Every

log = logging.getLogger("ckpt")

_STEP_NAME = re.compile(r"(?:.*/)?(?:checkpoint-)?(\d+)/?")
_STATE_FILE = "trainer_state.json"


def require_supported(trainer: Any, trial: object) -> None:
    """Raise InvalidArgument if a Trainer is set up in a way that can't be saved by ckpt, with what to do instead."""
    args = trainer.args
    if trial is not None or getattr(trainer, "hp_search_backend", None) is not None:
        raise InvalidArgument("all trials of a hyperparameter search would save to one repository: use Trainer for the search")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        raise InvalidArgument("CkptTrainer does not save FSDP1: set fsdp_version to 2 in fsdp_config")
    if trainer.is_deepspeed_enabled and _moving_reference(trainer) is not None:
        raise InvalidArgument(
            "CkptTrainer does not save the reference model of sync_ref_model with DeepSpeed: use DDP or FSDP2"
        )
    if args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end":
        raise InvalidArgument(
            f"hub_strategy={getattr(args.hub_strategy, 'value', args.hub_strategy)!r} uploads checkpoint folders, which ckpt "
            "does not write: use hub_strategy='end'"
        )


def _moving_reference(trainer: Any) -> Any:
    """Return the reference model of a trainer of TRL if it follows the model (`sync_ref_model`), or None."""
    return getattr(trainer, "ref_model", None) if getattr(trainer.args, "sync_ref_model", False) else None


class TrainerRun:
    """The Checkpointer of one call of `train`, and what it saves and loads."""

    def __init__(self, trainer: Any, url: Url | None, every: Every = None) -> None:
        """every: how often to save besides the saves of the Trainer; then the last step is saved, too."""
        if url is None and not os.environ.get(DIRECTORY_VARIABLE):
            url = Path(trainer.args.output_dir) / REPOSITORY_FOLDER
        limit = trainer.args.save_total_limit
        self._trainer, self._url = trainer, resolve_url(url)
        limit = limit if limit and limit > 0 else None
        self.data = DataPosition(GeneratedSamples(trainer) if GeneratedSamples.exist_in(trainer) else None)
        self.loss: Any = None
        self._every = every
        self._saver = Checkpointer(self._url, every=every, keep=limit)
        self.best = BestModel(trainer, self._url, self._saver, limit)
        self._epoch_end = EpochEnd(self._before_epoch_end)
        self._progress = TrainerProgress(trainer, self.data, self.best, self._epoch_end)
        self._noted_step: int | None = None
        self._is_noted_step_saved = False
        self._resume_step: int | None = None
        self._may_fall_back = self._is_loaded = False
        self._must_continue = False  # whether a step was loaded, and its random numbers and losses are still to be set
        self._resume_position: list[int] = []
        self._resumes_before_epoch_end = False
        self._resume_samples: int | None = None  # of one batch of each process
        self._resume_json = ""  # the state of the Trainer
        self._has_ended = False
        self._resume_best: int | None = None
        self._state: dict[str, Any] | None = None
        self._state_objects: tuple[Any, ...] = ()  # those that `_state` has
        self._attached: weakref.ref[Any] | None = None  # the optimizer for whose steps a save waits
        self._has_begun = False
        self._folder: str | None = None  # the parent of the folders that `choose` has made
        self._stack = ExitStack()

    def __enter__(self) -> TrainerRun:
        self._saver.__enter__()
        self._trainer.callback_handler.callbacks.insert(0, self._epoch_end)
        if self._trainer.is_deepspeed_enabled:
            self._stack.enter_context(skipped_engine_loads(self.owns))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._trainer.remove_callback(self._epoch_end)
        self._stack.close()
        try:
            self.best.close(kind, error, tb)
        finally:
            self._saver.__exit__(kind, error, tb)

    # --- which step --------------------------------------------------------------------------------------------

    def has_steps(self) -> bool:
        """Return whether the repository has a step to resume from."""
        return self._saver.repository.latest() is not None

    def describe_start(self) -> str:
        """Return in words what `choose` has chosen."""
        return "starts anew" if self._resume_step is None else f"continues from step {self._resume_step}"

    def choose(self, resume: str | os.PathLike[str] | bool | int | None) -> str | None:
        """Return what `Trainer.train` takes as its `resume_from_checkpoint`.

        This is a folder with the state of the Trainer, which belongs to a step of the repository, or a folder that Trainer has
        saved, or None for a training run from the beginning.
        """
        if resume is None or resume is False:
            return None
        if isinstance(resume, (str, os.PathLike)) and is_file(os.path.join(resume, _STATE_FILE)):
            return os.fspath(resume)
        newest = resume is True or str(resume).lower() == "true" or str(resume) == str(self._url)
        named = None if newest else _STEP_NAME.fullmatch(str(resume))
        if not newest and named is None:
            raise InvalidArgument(
                f"resume_from_checkpoint={resume!r} is neither a step nor a folder that Trainer saved: use True or a number"
            )
        target = {"trainer": self._progress.target()}
        target, start = self._saver.restore(target, step=int(named[1]) if named else None)
        if start:
            self._may_fall_back = newest
            return self._make_folder(start - 1, target)
        found = newest_folder_of_trainer(self._trainer.args.output_dir)
        log.warning("%s has no step yet: training starts from %s", self._saver.repository.url, found or "the beginning")
        return found

    def choose_older(self, error: IntegrityError) -> str:
        """Return the folder of the step before the one that is damaged; raise the error if the step was named or used."""
        step = self._resume_step
        if step is None or not self._may_fall_back or self._is_loaded:
            raise error
        repository = self._saver.repository
        mark_damaged_in_all_tiers(repository, [step])
        request = LoadRequest({"trainer": self._progress.target()}, group=as_group())
        found = load_newest(repository, False, request, step)
        if found is None or found[0] >= step:
            raise error
        log.error("step %d is damaged, training continues from step %d: %s", step, found[0], error)
        return self._make_folder(*found)

    def _make_folder(self, step: int, state: dict[str, Any]) -> str:
        self._resume_step, self._resume_position = step, state["trainer"].position
        self._resume_samples, self._resume_json = state["trainer"].batch_samples, state["trainer"].text
        self._resumes_before_epoch_end = state["trainer"].is_before_epoch_end
        self._resume_best = state["trainer"].best_step
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="ckpt-")
        folder = Path(self._folder, f"checkpoint-{step}")
        folder.mkdir(exist_ok=True)
        (folder / _STATE_FILE).write_text(state["trainer"].text)
        return str(folder)

    def position(self, epoch: int, batches: int) -> tuple[int, int]:
        """Return in which epoch the training continues, and after how many batches of it.

        epoch, batches: what the Trainer has computed from the number of updates. For data without a length, this is wrong after
        its first pass.
        """
        saved = tuple(self._resume_position)
        if self._has_ended or len(saved) != 2 or self._trainer.args.ignore_data_skip:
            return epoch, batches
        is_expected = (epoch, batches) == ((saved[0] + 1, 0) if self._resumes_before_epoch_end else saved)
        if is_expected or not has_length(self._trainer.train_dataset):
            samples = samples_in_batch(self._trainer)
            if saved[1] and self._resume_samples not in (None, samples):
                log.warning(
                    "step %s was saved after batch %d with %d samples in a batch of all processes, and now a batch has %d, so "
                    "samples are repeated or left out: use the batch size and processes of the save",
                    self._resume_step, saved[1], self._resume_samples, samples,
                )  # fmt: skip
            return saved
        log.warning(
            "step %s was saved after batch %d of epoch %d, but training resumes after batch %d of epoch %d, so samples repeat "
            "or are missing: use the same batch size, accumulation and processes",
            self._resume_step, saved[1], saved[0], batches, epoch,
        )  # fmt: skip
        return epoch, batches

    def owns(self, checkpoint: str | None) -> bool:
        """Return whether a folder is one that `choose` has made."""
        return None not in (checkpoint, self._folder) and str(checkpoint).startswith(f"{self._folder}{os.sep}")

    def has_ended(self, max_steps: int) -> bool:
        """Return whether the training has ended in the step from which it resumes.

        max_steps: how many updates the training has by the arguments of the script.
        """
        reason = None if self._resume_step is None else reason_of_end(self._trainer, self._resume_json, max_steps)
        if reason is not None:
            log.warning("step %d is the last one of the training, because %s", self._resume_step, reason)
        self._has_ended = reason is not None
        return self._has_ended

    def begin_loop(self, folder: str | None) -> str | None:
        """Begin a loop of the Trainer, and return the folder from which it resumes.

        A Trainer with `auto_find_batch_size` begins again with a smaller batch, and with new objects, if the memory does not
        suffice. The objects of the loop before are then released, once its saves are committed.

        folder: what `choose` has returned, or a folder of Trainer, or None.
        """
        if not self._has_begun:
            self._has_begun = True
            return folder
        self._saver.wait()
        self._state, self._state_objects, self._noted_step, self.loss = None, (), None, None
        if not self.owns(folder):
            self.best.resume(None)
        elif self._resume_step not in self._saver.repository.step_numbers():  # a later step has taken its place
            return self.choose(True)
        return folder

    # --- saving and loading ------------------------------------------------------------------------------------

    def _make_state(self, is_model_only: bool) -> dict[str, Any]:
        trainer = self._trainer
        if is_model_only:
            return {"trainer": self._progress, "train": model_state(trainer)}
        state = {
            "trainer": self._progress, "train": model_state(trainer, trainer.optimizer),
            "scheduler": trainer.lr_scheduler, "data": self.data,
        }  # fmt: skip
        if _moving_reference(trainer) is not None:
            state["reference"] = ModelState(_moving_reference(trainer))
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        if self._attached is None or self._attached() is not trainer.optimizer:
            if not trainer.is_deepspeed_enabled or only_step_changes_weights(trainer.model_wrapped):
                self._saver.attach(trainer.optimizer)
            self._attached = weakref.ref(trainer.optimizer)
        return state

    def save(self) -> None:
        """Save the step that the Trainer has just made, in the background; and the model, if it is the best so far."""
        trainer, step = self._trainer, self._trainer.state.global_step
        trainer.store_flos()
        self.best.note_step(step)
        self._saver.save(step, self._current_state())
        self.best.step_saved(step)

    def _current_state(self) -> dict[str, Any]:
        objects = self._saved_objects()
        if self._state is None or any(now is not before for now, before in zip(objects, self._state_objects, strict=True)):
            self._state = self._make_state(self._trainer.args.save_only_model)
            self._state_objects = objects
        return self._state

    def _saved_objects(self) -> tuple[Any, ...]:
        """Return the objects of the Trainer that a state has; the Trainer may replace each of them."""
        trainer = self._trainer
        return (
            trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler, _moving_reference(trainer),
            getattr(trainer.accelerator, "scaler", None),
        )  # fmt: skip

    def load(self) -> None:
        """Load the chosen step into the objects of the Trainer, which are complete by now."""
        assert self._resume_step is not None
        if not self._has_ended:
            self._require_position()
        self.best.resume(self._resume_best)
        self._state, self._state_objects = None, ()
        is_model_only = not self._has_training_state(self._resume_step)
        state = self._make_state(is_model_only) | {"trainer": self._progress.target()}
        self._saver.restore(state, step=self._resume_step)
        self._progress.copy_from(state["trainer"])
        self._is_loaded = True
        self._must_continue = not self._has_ended
        if self._has_ended and not is_model_only:
            self.data.continue_random()
        if self._must_continue and self._resumes_before_epoch_end and not CAN_CHOOSE_POSITION:
            warn_user(
                f"step {self._resume_step} was saved before the evaluation and the callbacks at the end of its epoch, which "
                "this version of transformers leaves out: install a newer one"
            )
        if is_model_only:
            warn_user(
                f"step {self._resume_step} has only the model (save_only_model): the optimizer, its schedule and the random "
                "numbers start anew"
            )

    def _has_training_state(self, step: int) -> bool:
        """Return whether a step has more than the model."""
        return "scheduler" in dict(children(self._saver.repository[step].tree(), ""))

    def restore_callbacks(self) -> None:
        """Set what callbacks count, such as the patience of EarlyStoppingCallback, to the values of the chosen step.

        Trainer does it only with `restore_callback_states_from_checkpoint`, which replaces the callbacks. These keep the
        arguments of the script.
        """
        if self._resume_step is None:
            return
        for name, saved in self._trainer.state.stateful_callbacks.items():
            callbacks = [each for each in self._trainer.callback_handler.callbacks if type(each).__name__ == name]
            for callback, state in zip(callbacks, saved if isinstance(saved, list) else [saved], strict=False):
                if isinstance(callback, ExportableState):
                    vars(callback).update(state.get("attributes", {}))

    def _require_position(self) -> None:
        """Raise InvalidArgument if this version of transformers can't continue in the saved pass of a stream."""
        passes = self._resume_position[0] if self._resume_position else 0
        if passes and not has_length(self._trainer.train_dataset) and not CAN_CHOOSE_POSITION:
            raise InvalidArgument(
                f"step {self._resume_step} is in pass {passes + 1} of data without a length, where this version of "
                "transformers cannot continue: install a newer one"
            )

    def _before_epoch_end(self) -> None:
        """Continue the training at the end of an epoch, if the resumed step has all batches of it."""
        if self._must_continue:
            self.continue_training()

    def continue_training(self) -> None:
        """Set the random generators, and the losses that are not logged yet. The Trainer has reset those before."""
        self._must_continue = False
        self.data.continue_random()
        if self._trainer.args.dataloader_num_workers and self._trainer.args.dataloader_persistent_workers:
            warn_user(PERSISTENT_WORKERS.format(option="dataloader_persistent_workers=False"))
        self._progress.restore_losses()

    def note_step(self) -> None:
        """Publish the heartbeat of a step; it may save the step and end the process where `ckpt-run` asks for that."""
        step = self._trainer.state.global_step
        if step != self._noted_step:
            self._noted_step = step
            self._is_noted_step_saved = self._saver.step(step, self._current_state(), loss=self.loss) is not None
        if self._every is not None and not self._is_noted_step_saved and self._trainer.control.should_training_stop:
            self._is_noted_step_saved = True
            self.save()
