"""The class Checkpointer for a training loop; long, because a third of it documents its public methods.

It restores a step at the start, saves when a save is due, and waits for its saves at the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from ckpt.api import check_step, load_newest, load_step
from ckpt.errors import FormatError, StepSkipped
from ckpt.format.codec import CodecOption
from ckpt.format.signature import KeyOption, as_keys
from ckpt.loading.rank_agreement import LoadRequest
from ckpt.loading.shared_read import ShareReads
from ckpt.repository.damage_registry import mark_damaged_in_all_tiers
from ckpt.repository.repository import Repository, Url, open_repository, resolve_url
from ckpt.repository.retention import Keep, as_keep
from ckpt.saving import session_registry
from ckpt.saving.attached_optimizers import AttachedOptimizers
from ckpt.saving.background_scrub import BYTES_PER_SECOND, Scrubber
from ckpt.saving.commit_wait import COMMIT_TIMEOUT_SECONDS
from ckpt.saving.handle import SaveHandle
from ckpt.saving.lone_rank_warning import group_that_saves
from ckpt.saving.nan_check import NanOption
from ckpt.saving.options import DifferenceOption, Options
from ckpt.saving.pipeline import save_after_failure
from ckpt.saving.skipped_step import skip_step
from ckpt.saving.staging_memory import prepare_staging
from ckpt.saving.writer_session import WriterSession
from ckpt.state.name_mapping import Rename
from ckpt.storage.base.errors import CkptError, IntegrityError, InvalidArgument, InvalidName, Refused, UnknownScheme
from ckpt.support.fork_check import CreatorProcess
from ckpt.support.validation import check_switch, checked_bytes, checked_every, checked_positive
from ckpt.tiers.manager import TierManager
from ckpt.tiers.tier_spec import Tier, checked_tiers
from ckpt.tiers.unlisted_tiers import wait_until_listed
from ckpt.training import heartbeat_marks, heartbeat_page, import_report
from ckpt.training.cuda_timer import is_recording_graph
from ckpt.training.idle_window import IdleWindow, idle_window_after
from ckpt.training.loss_monitor import LossMonitor, reason_not_to_save
from ckpt.training.loss_spikes import spike_detector_from_env
from ckpt.training.restore_step_limit import restore_step_limit_from_env
from ckpt.training.save_interval import Every, interval_seconds, mtbf_seconds_from_env, reaches_multiple
from ckpt.training.save_schedule import SaveSchedule

log = logging.getLogger("ckpt")

_STEP, _COMPILE, _END = map(heartbeat_page.PHASES.index, ("step", "compile", "end"))


class Checkpointer:
    """Saves to one repository from a training loop, in the background.

        with ckpt.Checkpointer(url, every=100, keep=3) as ck:
            state, start = ck.restore(state)
            for step in range(start, total):
                loss = train_step(state)
                ck.step(step, state, loss=loss)

    url: as for `ckpt.save`.
    every: when a step is saved: every so many steps, after a timedelta, "auto", or None to save only by `save`. "auto" is the
        interval that loses the least time. It follows from the measured cost of a save and from the time between failures,
        which `ckpt-run` measures; without `ckpt-run` it is taken as three hours.
    keep: how many of the newest steps to keep, or a `ckpt.Keep`; None keeps all.
    memory: bytes of staging memory; a larger state is staged in several parts.
    in_flight: the number of saves that may run at once. Two saves of one step never do.
    codec, digest, group, timeout, verify_replicas, full_every, key: as for `ckpt.save`.
    nan: as for `ckpt.save`. If the loss of a step is finite, a NaN in its state gives no warning.
    tiers: stores in front of `url`, the nearest first; see `ckpt.Tier`. A save is complete in the nearest one. Steps are copied
        to `url` in the background: those that `every` selects, those of `save`, and the newest one at the end.
    scrub: bytes per second that the background scrub reads; None turns it off. It reads blocks that earlier steps wrote and
        newer steps refer to, and pauses during a save. It logs a damaged block, and the next save writes that block again. With
        tiers, rank 0 scrubs the repository at `url`.

    The constructor takes the writer lease of the repository; `close` releases it. The next call, or `close`, raises
    SaveFailed with the step of a save that failed in the background. A process that is forked from this one can't save with
    this object (CkptError). A forked process that only inherits it, such as a worker of a DataLoader, is not affected.

    Raises:
        InvalidArgument: An argument has a value that makes no sense.
        RepositoryBusy: Another live process writes to the repository.
        FormatError: Something other than a repository is at the URL, or a newer version wrote it.
        IntegrityError: The marker of the repository is damaged.
        StoreError: The store failed; UnknownScheme where no store serves the URL.
        GroupError: The ranks could not meet.
    """

    @heartbeat_marks.publish_trouble_on("unusable", InvalidArgument, InvalidName, UnknownScheme, FormatError, Refused)
    def __init__(
        self,
        url: Url | None = None,
        *,
        every: Every = "auto",
        keep: int | Keep | None = None,
        codec: CodecOption = "auto",
        digest: str = "auto",
        memory: int | None = None,
        in_flight: int = 1,
        group: object = "auto",
        timeout: float = COMMIT_TIMEOUT_SECONDS,
        verify_replicas: bool | None = None,
        nan: NanOption = "warn",
        full_every: DifferenceOption = "auto",
        tiers: Sequence[Tier] = (),
        key: KeyOption = None,
        scrub: int | None = BYTES_PER_SECOND,
    ) -> None:
        every, tiers, scrub = checked_every(every), checked_tiers(tiers), checked_bytes("scrub", scrub)
        self._creator_process = CreatorProcess()
        in_flight = checked_positive("in_flight", in_flight, "a positive number of saves")
        if in_flight > 1 and tiers:
            raise InvalidArgument(f"in_flight={in_flight}: use 1 with tiers, where a save must end before the next one begins")
        self._attached = AttachedOptimizers(self._before_step)
        url, ranks = resolve_url(url), group_that_saves(group)
        self._options = Options(
            codec=codec, digest=digest, memory=memory, keep=as_keep(keep), overwrite=True, in_flight=in_flight,
            deferrable=self._attached.has, timeout=timeout, verify_replicas=verify_replicas, nan=nan,
            full_every=full_every,
        )  # fmt: skip
        # Only the thread that trains changes these. A committing thread reads `_cost_seconds`, through `_interval`.
        self._last_save: SaveHandle | None = None
        self._last_save_started_at = time.monotonic()
        self._staging_prepared = False
        self._cost_seconds = 0.1  # how long the previous save blocked the loop
        self._mtbf_seconds = mtbf_seconds_from_env()
        self._heartbeat_page = heartbeat_page.own_page()
        if self._heartbeat_page is not None:
            self._heartbeat_page.defer_sigterm()
        self._loss_monitor = (
            None if self._heartbeat_page is None else LossMonitor(self._heartbeat_page, spike_detector_from_env())
        )
        keys = as_keys(key)
        self._tiers = TierManager(url, every, keep, tiers, ranks, keys) if tiers else None
        self._every = every if self._tiers is None else self._tiers.every
        by_time = self._every is not None and not isinstance(self._every, int)
        self._schedule = SaveSchedule(self._interval) if by_time and ranks.size > 1 else None
        if self._schedule is not None:
            self._options = replace(self._options, propose_next_step=self._schedule.propose_next_step)
        self._last_step: int | None = None
        self._import_reports_left = 2  # one at the first step, and one after the first save
        self._idle_window: IdleWindow | None = None
        self._has_restored_or_saved = False
        self._session: WriterSession | None = (
            self._tiers.nearest if self._tiers else session_registry.enter(open_repository(url, keys), ranks)
        )
        self._scrubber = self._make_scrubber(scrub)

    def _make_scrubber(self, bytes_per_second: int | None) -> Scrubber:
        session = self._require_open()
        if self._tiers is not None:
            return Scrubber(self._tiers.main_repo, None, None if session.group.rank else bytes_per_second)
        return Scrubber(session.repo, None if session.group.size == 1 else session.group.rank, bytes_per_second)

    @property
    def repository(self) -> Repository:
        """The repository for reading, with the steps of all tiers."""
        return self._require_open().repo if self._tiers is None else self._tiers.repository

    # --- restoring ---------------------------------------------------------------------------------------------

    def restore(
        self, state: Any, *, step: int | None = None, strict: bool = False, rename: Rename | None = None,
        share_reads: ShareReads = "auto",
    ) -> tuple[Any, int]:  # fmt: skip
        """Fill `state` from the newest complete step (or from `step`) and return it with the number of the next step.

            state, start = ck.restore({"model": model, "optimizer": optimizer})

        state: as `like` of `ckpt.load`.
        step: the number of the step to restore. None means the newest complete one.
        strict: whether to raise IntegrityError instead of skipping a damaged step with a warning.
        rename, share_reads: as for `ckpt.load`.

        After a roll-back, `ckpt-run` sets CKPT_BEFORE; a step below that number is then restored, if there is one. After the
        first save that follows, it has no effect any more.

        If the restored step is not the newest, the next save opens a new training line. The steps saved after the restored
        one are then abandoned: they never count as the newest again, and `keep` deletes them first. A save of a lower number
        than that of the restored step opens a new line, too, so that it is the newest.

        Returns:
            The state and the number of the next step. If no step exists, the unchanged state and 0.

        Raises:
            InvalidArgument: An argument has a value that makes no sense.
            StepNotFound: `step` does not exist.
            LeafNotFound: `state` has a leaf that the step does not have.
            LeafMismatch: A leaf of `state` has another shape, dtype or kind than the saved one.
            UnsupportedLeaf: The code of an object in `state` failed, such as its state_dict().
            IntegrityError: The step is damaged, and was named or `strict` is True; or all steps are damaged.
            FormatError: A newer version wrote the step.
            SaveFailed: A save that is still running makes no progress.
            StoreError: The store failed.
            GroupError: The ranks could not communicate, or asked for different steps.
            CkptError: This Checkpointer is closed, or belongs to the parent process.
        """
        check_switch("strict", strict)
        session, repo = self._require_open(), self.repository
        self._idle_window = None
        self._wait_ignoring_errors()  # a running save may delete the files that are read next
        (self._tiers or session).forget_previous()  # a save refers to no block of a step that this load finds damaged
        request = LoadRequest(state, rename=rename, group=session.group, share_reads=share_reads, bypass_cache=True)
        with heartbeat_marks.phase("load"):
            if step is not None:
                number = check_step(step)
                start, loaded = number + 1, load_step(repo, number, request)
            else:
                has_saved_since = self._last_save is not None and session.lineage.base_step is None
                restore_step_limit = None if has_saved_since else restore_step_limit_from_env()
                if self._tiers is not None and session.group.rank == 0:  # it lists the steps for all ranks
                    wait_until_listed(self._tiers.repository)
                # Unless `strict`, an IntegrityError means that all steps are damaged, so a restart would not help.
                with heartbeat_marks.publish_trouble_on("damaged", *([] if strict else [IntegrityError])):
                    found = load_newest(repo, strict, request, restore_step_limit)
                start, loaded = (0, state) if found is None else (found[0] + 1, found[1])
                if restore_step_limit is not None and start <= restore_step_limit:
                    # The later steps may have bad weights: no save may refer to their blocks, and `keep` must not count them.
                    later = [n for n in repo.step_numbers() if n >= restore_step_limit]
                    mark_damaged_in_all_tiers(repo, later)
            session.lineage.note_restored(start - 1)  # all tiers share this lineage
            if self._tiers is not None:
                self._tiers.load_ended(start - 1)
        if self._heartbeat_page is not None:
            if self._tiers is None:
                self._heartbeat_page.publish_durable(start - 1)
            self._heartbeat_page.publish_restored(start - 1, again=self._has_restored_or_saved)
            self._heartbeat_page.beat(_COMPILE, start - 1)  # the first step may compile, which takes longer than a step
        self._has_restored_or_saved, self._last_step = True, start - 1
        if self._schedule is not None:
            self._schedule.restored()
        return loaded, start

    # --- saving ------------------------------------------------------------------------------------------------

    def step(self, step: int, state: Any, *, loss: Any = None) -> SaveHandle | None:
        """Record that `step` is done; save `state` in the background if a save is due.

            handle = ck.step(step, state, loss=loss)

        step: the number of the step that is done.
        state: as for `ckpt.save`.
        loss: a number or an array of one element. A loss on a CUDA device or of jax is waited for only if a save is due. A step
            whose loss is not finite is not saved.

        Under `ckpt-run` this call is also the heartbeat of the rank. After a loss that is not finite, or one that jumps if
        `ckpt-run` has the option `--spike`, no step is saved until `ckpt-run` has rolled the job back. When `ckpt-run` stops
        the job, this call saves the step and raises SystemExit.

        Returns:
            The handle of the save, or None if no save is due or the loss is bad.

        Raises:
            InvalidArgument: `step` is not a step number, or `loss` is not a number.
            SaveFailed: An earlier save failed in the background, and its error is the cause; or it makes no progress.
            UnsupportedLeaf: The state has a value that can't be stored without pickle. The first call and each save find it.
            SystemExit: `ckpt-run` stops the job. The status is 0, and the step is saved unless its loss is bad.
            CkptError: This Checkpointer is closed, belongs to the parent process, or the save failed; see `ckpt.save`.
        """
        if (idle_window := self._idle_window) is not None:
            try:
                page, after_step, until_step, deadline_ns = idle_window
                if step > after_step and page.beat_if_idle(step, loss, until_step, deadline_ns):
                    return None
            except TypeError:  # not a number; check_step raises InvalidArgument for it
                pass
            self._idle_window = None
        step = check_step(step)
        self._require_open()
        if self._heartbeat_page is not None:
            self._publish_step(self._heartbeat_page, step, state, loss)
        due = self._is_due(step)
        if not due:
            # A save that is due raises the error itself, and reports it to the other ranks.
            (self._tiers or self._require_open()).raise_failed()
            if not self._staging_prepared:
                self._prepare_staging(state)
            if self._heartbeat_page is not None:
                self._idle_window = self._idle_window_after(step, self._heartbeat_page)
            return None
        return self._save_unless_bad(step, state, loss, all_tiers=False)

    def _idle_window_after(self, step: int, page: heartbeat_page.HeartbeatPage) -> IdleWindow | None:
        """Return the window in which a step needs only a heartbeat, as no save runs or is due; None if a step may need more."""
        under_way = self._last_save is not None and not self._last_save.done()
        if (
            under_way
            or self._import_reports_left == 2
            or self._tiers is not None
            or self._loss_monitor is None
            or not self._loss_monitor.can_skip_finite_losses
        ):
            return None
        if self._last_save is not None and self._import_reports_left:
            return None
        return idle_window_after(step, page, self._every, self._schedule, lambda: self._last_save_started_at + self._interval())

    def _publish_step(self, page: heartbeat_page.HeartbeatPage, step: int, state: Any, loss: Any) -> None:
        if loss is not None and self._loss_monitor is not None:
            self._loss_monitor.add(step, loss)
        page.acknowledge_stop(step)
        page.beat(_STEP, step)
        if self._import_reports_left and (
            self._import_reports_left == 2 or (self._last_save is not None and self._last_save.done())
        ):
            # The fork server imports these modules before the next start. A load needs those that the first save has imported.
            self._import_reports_left -= 1
            import_report.write_report()
        if page.should_stop(step):
            if (why := reason_not_to_save(self._loss_monitor, step, loss)) is not None:
                self._skip_step(step, why)
                log.warning(
                    "step %d is not saved (%s), and the job ends as requested; start it again to continue from the newest "
                    "complete step", step, why,
                )  # fmt: skip
            else:
                try:
                    self.save(step, state, blocking=True).result()
                    log.warning("step %d is saved, and the job ends as requested", step)
                except StepSkipped as error:
                    log.warning("%s; the job ends as requested", error)
            raise SystemExit(0)

    def _skip_step(self, step: int, reason: str) -> None:
        """Publish that this rank does not save the step, so that no rank saves it and the other ranks do not wait."""
        session = self._require_open()
        if self._schedule is not None:  # first: the other ranks count this step also if the report fails
            self._schedule.save_skipped(step)
        if session.group.size > 1:
            error = StepSkipped(
                f"step {step} is not saved because rank {session.group.rank} leaves it out: {reason}; look at its log"
            )
            if self._tiers is not None:
                self._tiers.skip_step(check_step(step), error)
            else:
                skip_step(session, check_step(step), error)

    def save_unless_bad(self, step: int, state: Any, *, loss: Any) -> SaveHandle | None:
        """Save `state` now, to every tier, unless the loss of a rank is bad: then no rank saves the step.

            ck.save_unless_bad(last, state, loss=loss)

        This is for the last step of a training run. All ranks call it.

        step, state: as for `save`.
        loss: as for `step`.

        Returns:
            The handle of the save, or None if the loss of this rank is bad. If that of another rank is bad, `result()` of the
            handle raises StepSkipped.

        Raises:
            SaveFailed: An earlier save failed in the background; its error is the cause.
            CkptError: As for `save`.
        """
        return self._save_unless_bad(check_step(step), state, loss, all_tiers=True)

    def _save_unless_bad(self, step: int, state: Any, loss: Any, all_tiers: bool) -> SaveHandle | None:
        if (reason := reason_not_to_save(self._loss_monitor, step, loss)) is not None:
            hint = _CONTINUE_HINT if self._heartbeat_page is None else "ckpt-run restarts all ranks"
            log.warning("step %d is not saved: %s; %s", step, reason, hint)
            self._skip_step(step, reason)
            return None
        return self._save(step, state, False, all_tiers, is_loss_finite=loss is not None)

    def save(self, step: int, state: Any, *, blocking: bool = False) -> SaveHandle:
        """Save `state` now, to every tier, and replace the step if it exists.

            ck.save(step, state, blocking=True)

        step, state: as for `ckpt.save`. A step may exist because the loop repeats it after a roll-back.
        blocking: whether to return only when the step is committed.

        Returns:
            The handle of the save.

        Raises:
            SaveFailed: An earlier save failed in the background; its error is the cause.
            UnsupportedLeaf: The state has a value that can't be stored without pickle.
            CkptError: This Checkpointer is closed, belongs to the parent process, or the save failed; see `ckpt.save`.
        """
        check_switch("blocking", blocking)
        return self._save(step, state, blocking, True)

    def _save(self, step: int, state: Any, blocking: bool, all_tiers: bool, is_loss_finite: bool = False) -> SaveHandle:
        """Save one step, and return its handle.

        all_tiers: whether the step is copied to every tier, whatever its number.
        is_loss_finite: whether the step has a finite loss, so that a NaN in the state needs no warning.
        """
        options = replace(self._options, nan="allow") if is_loss_finite and self._options.nan == "warn" else self._options
        session, step = self._require_open(), check_step(step)
        began, self._idle_window = time.monotonic(), None
        self._attached.find_memory()
        if not self._has_restored_or_saved:
            session.lineage.note_joined(step)
            self._has_restored_or_saved = True
        elif self._last_save is not None and step < self._last_save.step:
            session.lineage.note_went_back()
        self._scrubber.note_save_began()
        try:
            with heartbeat_marks.phase("save"):
                if self._tiers is not None:
                    handle, earlier_failure = self._tiers.save(step, state, options, blocking, all_tiers)
                else:
                    handle, earlier_failure = save_after_failure(session, state, step, options, blocking)
        except BaseException:
            self._scrubber.note_save_ended(None)
            if self._schedule is not None:  # the other ranks count this step, too
                self._schedule.save_skipped(step)
            raise
        finally:
            self._attached.forget_memory()
        handle.when_done(lambda: self._scrubber.note_save_ended(None if handle.failed() else handle.checkpoint().commit))
        if self._heartbeat_page is not None:
            handle.when_done(partial(self._publish_commit, self._heartbeat_page, handle))
        self._last_save, self._last_save_started_at = handle, began
        self._cost_seconds = time.monotonic() - began
        if self._schedule is not None:
            self._schedule.save_started(step, handle)
        if earlier_failure is not None:  # in a group, this save has begun nevertheless
            raise earlier_failure
        return handle

    def _publish_commit(self, page: heartbeat_page.HeartbeatPage, handle: SaveHandle) -> None:
        if not handle.failed():
            line = handle.checkpoint().commit.line
            if self._tiers is None:
                page.publish_durable(handle.step, line)
            page.publish_committed(handle.step, line)

    def _prepare_staging(self, state: Any) -> None:
        """Map the staging memory at the first step that is not saved, because the state is complete from then on."""
        self._staging_prepared = True
        with heartbeat_marks.phase("save"):  # it calls the state's own code, as a save does, and so may take as long
            prepare_staging(state, self._options, self._require_open().group)

    def _is_due(self, step: int) -> bool:
        step_before, self._last_step = self._last_step, step
        is_due_further = self._tiers is not None and self._tiers.is_due_by_number(step, step_before)
        return self._is_due_nearest(step, step_before) or is_due_further

    def _is_due_nearest(self, step: int, step_before: int | None) -> bool:
        every = self._every
        if every is None:
            return False
        if self._schedule is not None:
            due = self._schedule.is_due(step)
            if (missed := self._schedule.take_missed_step()) is not None:
                self._skip_step(
                    missed,
                    "this rank had passed the step before it learned that the step was due; give every= a number of steps",
                )
            return due
        if isinstance(every, int):
            return reaches_multiple(step, step_before, every)
        elapsed = time.monotonic() - self._last_save_started_at
        return elapsed >= self._interval() and (every != "auto" or self._last_save is None or self._last_save.done())

    def _interval(self) -> float:
        """Return the seconds between two saves."""
        every: timedelta | Literal["auto"] = self._every if isinstance(self._every, timedelta) else "auto"
        return interval_seconds(every, self._cost_seconds, self._mtbf_seconds)

    # --- deferred copies ---------------------------------------------------------------------------------------

    def attach(self, *optimizers: Any) -> None:
        """Let saves copy the parameters and moments of these optimizers while the next forward and backward run.

            ck.attach(optimizer)

        optimizers: torch optimizers, or wrappers of them such as those of accelerate.

        The step() of an optimizer then waits until a running save has copied its memory. All other leaves that can change are
        still copied before `save` returns. A parameter that something else changes in place during the copy makes that save
        fail with StateChanged, if torch counts the change, or if it changes a whole tensor on the host. A change that torch
        does not count (by `.data` or a numpy view) is not found on a GPU, nor if it changes few elements: see
        docs/reference/saving.md.

        Raises:
            CkptError: An argument is not a torch optimizer.
        """
        for optimizer in optimizers:
            self._attached.add(optimizer)

    def _before_step(self, optimizer: object, *_: object) -> None:
        if self._session is not None and self._creator_process.is_current:
            (self._tiers or self._session).wait_staged()
        if is_recording_graph():
            self._attached.remove(optimizer)
            log.warning(
                "an attached optimizer's step is recorded in a CUDA graph, which runs without calling ckpt: each save copies "
                "its parameters and moments before it returns"
            )

    # --- the end -----------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until all saves are committed and each tier has the steps that are due there.

        Raises:
            SaveFailed: A save failed; its error is the cause.
        """
        session = self._require_open()
        with heartbeat_marks.phase("save"):
            if self._tiers is not None:
                self._tiers.wait(self._progress_callback("save"))
                return
            session.wait()
        session.raise_failed()

    def _progress_callback(self, phase: str) -> Callable[[], None] | None:
        """Return a function that publishes a heartbeat during a long wait; None without a heartbeat page."""
        return None if self._heartbeat_page is None else partial(self._heartbeat_page.beat, heartbeat_page.PHASES.index(phase))

    def _wait_ignoring_errors(self) -> None:
        """Wait until all saves have ended; a later call raises their errors."""
        (self._tiers.wait_ignoring_errors if self._tiers is not None else self._require_open().wait)()

    def close(self) -> None:
        """Wait for the running saves, and release the writer lease of the repository.

        With tiers, the newest step is first copied to `url`. In a forked child this does nothing, because the saves belong to
        the parent.

        Raises:
            SaveFailed: A save failed; its error is the cause.
        """
        self._close(True)

    def _close(self, promote: bool) -> None:
        if self._session is None:
            return
        session, self._session, self._idle_window = self._session, None, None
        if not self._creator_process.is_current:
            return
        if self._heartbeat_page is not None:  # the end may take longer than a step
            self._heartbeat_page.beat(_END)
        self._attached.detach()
        self._scrubber.close()
        if self._tiers is not None:
            with heartbeat_marks.phase("end"):
                self._tiers.close(promote, self._progress_callback("end"))
            return
        try:
            session.wait()
            session.raise_failed()
        finally:
            session_registry.leave(session)

    def _require_open(self) -> WriterSession:
        if self._session is None:
            raise CkptError("this Checkpointer is closed: open a new one")
        self._creator_process.require_current(
            f"the Checkpointer of {self._session.repo.url}",
            "make the Checkpointer in the process that saves, with another URL where both do",
        )
        return self._session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        ends_well = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is None or ends_well:
            self.close()  # its error replaces an exit with status 0
            return
        try:
            self._close(False)  # copies nothing to `url`: a restart waits for this process
        except CkptError as failed:  # the error that ended the block must reach the user
            log.error("%s", failed)


_CONTINUE_HINT = (
    "to continue from the newest complete step, call restore(state) with a lower learning rate or other data; to keep this "
    "state, call save(step, state), or call step() without loss="
)
