"""The object for a training loop: restores at the start, saves when due, and sees to the end of what it began."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from ckpt.api import check_step, load_newest, load_step
from ckpt.block_io import staging_arena as arenas
from ckpt.errors import FormatError
from ckpt.format.codec import CodecOption
from ckpt.format.signature import KeyOption, as_keys
from ckpt.groups import as_group
from ckpt.loading.group_load import LoadRequest
from ckpt.loading.shared_read import ShareReads
from ckpt.repository.damage_registry import mark_damaged
from ckpt.repository.repository import Repository, Url, open_repository, resolve_url
from ckpt.repository.retention import Keep, as_keep
from ckpt.saving import session_registry as sessions
from ckpt.saving.background_scrub import BYTES_PER_SECOND, Scrubber
from ckpt.saving.handle import SaveHandle
from ckpt.saving.nan_check import NanOption
from ckpt.saving.options import Options
from ckpt.saving.pipeline import save as run_save
from ckpt.saving.pipeline import skip_step, staging_bytes
from ckpt.saving.rank_parts import TIMEOUT_SECONDS
from ckpt.saving.writer_session import Session
from ckpt.state.leaves.base import ArrayLeaf
from ckpt.state.name_mapping import Rename
from ckpt.storage.base.errors import CkptError, IntegrityError, InvalidArgument, InvalidName, Refused, UnknownScheme
from ckpt.support.fork_check import CreatorProcess
from ckpt.support.validation import check_switch, checked_bytes, checked_every, checked_positive
from ckpt.tiers.manager import TierManager
from ckpt.tiers.tier_spec import Tier, checked_tiers
from ckpt.training import heartbeat_page as pulses
from ckpt.training import import_report
from ckpt.training.loss_monitor import LossMonitor, as_number
from ckpt.training.loss_spikes import spike_detector_from_env
from ckpt.training.save_interval import Every, interval_seconds, mtbf_seconds_from_env
from ckpt.training.save_schedule import SaveSchedule

log = logging.getLogger("ckpt")

_STEP, _COMPILE, _END = map(pulses.PHASES.index, ("step", "compile", "end"))


class Checkpointer:
    """Saves to one repository from a training loop, in the background.

        with ckpt.Checkpointer(url, every=100, keep=3) as ck:
            state, start = ck.restore(state)
            for step in range(start, total):
                loss = train_step(state)
                ck.step(step, state, loss=loss)

    url: the repository; without it the one that `ckpt-run --dir` or the environment (CKPT_DIR) names.
    every: steps, a timedelta, "auto" (the interval that loses the least time, from the measured cost of a save and the time
        between failures, which `ckpt-run` measures), or None to save only by `save`.
    keep: the newest so many steps, or a `ckpt.Keep`; None keeps all.
    memory: staging memory in bytes; a larger state is staged in pieces. in_flight: saves under way at once.
    codec, digest, group, timeout, verify_replicas, key: as for `ckpt.save`.
    nan: as for `ckpt.save`; of a step with a finite loss nobody is warned.
    tiers: nearer places that saves land in first, the nearest first; see `ckpt.Tier`. What comes to `url` is copied there in
        the background: the steps that `every` names, those of `save`, and the newest one at the end.

    scrub: bytes per second that are read again in the background, of blocks that earlier steps wrote and newer ones refer to;
        None reads none. It rests while a save is under way. A bad block is logged, and the next save writes it anew. With tiers
        those of `url` are read, by rank 0.

    Opening takes the right to write to the repository (RepositoryBusy where another process has it) and holds it until
    `close`. An error of a save in the background is raised by the next call and by `close`, with its step named.
    A child that is forked meanwhile may not save with it (CkptError); one that only inherits it, such as a worker of a
    DataLoader, is not affected.
    """

    @pulses.publish_trouble_on("unusable", InvalidArgument, InvalidName, UnknownScheme, FormatError, Refused)
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
        group: Any = "auto",
        timeout: float = TIMEOUT_SECONDS,
        verify_replicas: bool | None = None,
        nan: NanOption = "warn",
        tiers: Sequence[Tier] = (),
        key: KeyOption = None,
        scrub: int | None = BYTES_PER_SECOND,
    ) -> None:
        every, tiers = checked_every(every), checked_tiers(tiers)
        self._creator_process = CreatorProcess()
        in_flight = checked_positive("in_flight", in_flight, "a positive number of saves")
        if in_flight > 1 and tiers:
            raise InvalidArgument(f"in_flight={in_flight}: with tiers a save ends in the nearest place before the next begins")
        self._attached: list[Any] = []
        self._hooks: list[Any] = []
        url, ranks = resolve_url(url), as_group(group)
        self._options = Options(
            codec, digest, memory, as_keep(keep), True, in_flight, self._is_attached, timeout, verify_replicas, nan
        )
        self._lazy_memory: frozenset[int] = frozenset()
        self._last_save: SaveHandle | None = None
        self._last_save_started_at = time.monotonic()
        self._staging_prepared = False
        self._cost_seconds = 0.1  # of the save before, as the loop felt it
        self._mean_time_to_failure_seconds = mtbf_seconds_from_env()
        self._heartbeat_page = pulses.own_page()
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
        self._import_reports_left = 2
        self._idle_window: tuple[pulses.HeartbeatPage, int, int, int] | None = None
        """Nothing is to be done but to beat: after which step, until which step, until which moment."""
        self._has_restored_or_saved = False
        """Whether it has restored or saved a step."""
        self._session: Session | None = (
            self._tiers.nearest if self._tiers else sessions.enter(open_repository(url, keys), ranks)
        )
        self._scrubber = self._make_scrubber(checked_bytes("scrub", scrub))

    def _make_scrubber(self, bytes_per_second: int | None) -> Scrubber:
        session = self._require_open()
        if self._tiers is not None:
            return Scrubber(self._tiers.record, None, None if session.group.rank else bytes_per_second)
        return Scrubber(session.repo, None if session.group.size == 1 else session.group.rank, bytes_per_second)

    @property
    def repository(self) -> Repository:
        """For looking at what is there, in any tier."""
        return self._require_open().repo if self._tiers is None else self._tiers.repository

    # --- restoring ---------------------------------------------------------------------------------------------

    def restore(
        self, state: Any, *, step: int | None = None, strict: bool = False, rename: Rename | None = None,
        share_reads: ShareReads = "auto",
    ) -> tuple[Any, int]:  # fmt: skip
        """Fill `state` from the newest whole step (or from `step`) and return it with the number of the next step.

        Where there is no step yet, returns the state untouched, and 0. A damaged step is passed over with a warning,
        unless `strict` or named. After a roll-back `ckpt-run` names steps that may be spoiled (CKPT_BEFORE): an older one is
        taken, if there is any.

        Where the step is not the newest, the next save opens a new line of training: what was saved after the restored step is
        abandoned. It is never taken for newer again, and `keep` deletes it first.
        """
        check_switch("strict", strict)
        session, repo = self._require_open(), self.repository
        self._idle_window = None
        self._wait_ignoring_errors()  # a save under way may delete what is read here
        request = LoadRequest(state, rename=rename, group=session.group, share_reads=share_reads, bypass_cache=True)
        with pulses.phase("load"):
            if step is not None:
                number = check_step(step)
                start, loaded = number + 1, load_step(repo, number, request)
            else:
                restore_limit = pulses.restore_limit_from_env()
                with pulses.publish_trouble_on("damaged", *([] if strict else [IntegrityError])):  # all of them
                    found = load_newest(repo, strict, request, restore_limit)
                start, loaded = (0, state) if found is None else (found[0] + 1, found[1])
                if (
                    restore_limit is not None and start <= restore_limit
                ):  # nothing may refer to the later ones, or keep them as good
                    later = [n for n in repo.step_numbers() if n >= restore_limit]
                    mark_damaged(session.repo, later)
            session.lineage.note_restored(start - 1)  # shared by all tiers
            if self._tiers is not None:
                self._tiers.load_ended(start - 1)
        if self._heartbeat_page is not None:
            if self._tiers is None:
                self._heartbeat_page.publish_durable(start - 1)
            self._heartbeat_page.publish_restored(start - 1, again=self._has_restored_or_saved)
            self._heartbeat_page.beat(_COMPILE, start - 1)  # what comes first may compile: no step is as long
        self._has_restored_or_saved = True
        return loaded, start

    # --- saving ------------------------------------------------------------------------------------------------

    def step(self, step: int, state: Any, *, loss: Any = None) -> SaveHandle | None:
        """Say that `step` is done; save in the background if a save is due, and return its handle then.

        A loss that is not finite stops this save: what diverged is not worth keeping. Under `ckpt-run` this is the
        heartbeat, too; after a loss that is not finite, or that jumps where `--spike` was given, nothing is saved any more
        until ckpt-run has rolled the job back; and where the job is to end, it is saved now, and SystemExit is raised.

        loss: a number or an array of one element. One on a CUDA device, or of jax, is not waited for but where a save is due.
        """
        if (idle_window := self._idle_window) is not None:
            try:
                if step > idle_window[1] and idle_window[0].beat_if_idle(step, loss, idle_window[2], idle_window[3]):
                    return None
            except TypeError:  # no number: it is told below
                pass
            self._idle_window = None
        step = check_step(step)
        self._require_open()
        if self._heartbeat_page is not None:
            self._publish_step(self._heartbeat_page, step, state, loss)
        due = self._is_due(step)
        if not due:
            (self._tiers or self._require_open()).raise_failed()  # else the save does it, and tells the other ranks
            if not self._staging_prepared:
                self._prepare_staging(state)
            if self._heartbeat_page is not None:
                self._idle_window = self._idle_window_after(step, self._heartbeat_page)
            return None
        if (reason := self._reason_not_to_save(step, loss)) is not None:
            log.warning("step %d is not saved: %s; %s", step, reason, _CONTINUE_HINT)
            self._skip_step(step, reason)
            return None
        return self._save(step, state, False, False, is_loss_finite=loss is not None)

    def _idle_window_after(self, step: int, page: pulses.HeartbeatPage) -> tuple[pulses.HeartbeatPage, int, int, int] | None:
        """Until when steps need no more than a beat: no save is under way, and none is due. None where that is not known."""
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
        every, until_step, until = self._every, sys.maxsize, sys.maxsize
        if isinstance(every, int):
            until_step = step + every - (step + 1) % every
        elif self._schedule is not None:
            if (due := self._schedule.next_due_step()) is None:
                return None
            until_step = due
        elif every is not None:
            until = int(1e9 * (self._last_save_started_at + self._interval()))
        return page, step, until_step, until

    def _publish_step(self, page: pulses.HeartbeatPage, step: int, state: Any, loss: Any) -> None:
        if loss is not None and self._loss_monitor is not None:
            self._loss_monitor.add(step, loss)
        page.acknowledge_stop(step)
        page.beat(_STEP, step)
        if self._import_reports_left and (
            self._import_reports_left == 2 or (self._last_save is not None and self._last_save.done())
        ):
            self._import_reports_left -= 1  # at the first step, and when a save is done: a load needs what that has imported
            import_report.write_report()
        if page.should_stop(step):
            if (why := self._reason_not_to_save(step, loss)) is not None:
                self._skip_step(step, why)
                log.warning("step %d is not saved (%s), and the job ends as it was asked to; %s", step, why, _CONTINUE_HINT)
            else:
                self.save(step, state, blocking=True).result()
                log.warning("step %d is saved, and the job ends as it was asked to", step)
            raise SystemExit(0)

    def _reason_not_to_save(self, step: int, loss: Any) -> str | None:
        """Why the state is not worth saving; None where it is."""
        if self._loss_monitor is None:
            number = 0.0 if loss is None else as_number(loss)
            return None if math.isfinite(number) else f"its loss is {number}"
        self._loss_monitor.wait()
        if (bad := self._loss_monitor.bad_loss) is None:
            return None
        whose = "its loss" if bad.step == step else f"the loss of step {bad.step}"
        return f"{whose} is {bad.loss}" if bad.kind == "not finite" else f"{whose} jumped to {bad.loss}"

    def _skip_step(self, step: int, reason: str) -> None:
        """This rank does not save a step that the others may save: they need not wait for it."""
        session = self._require_open()
        if session.group.size > 1 and self._tiers is not None:
            self._tiers.skip_step(check_step(step), CkptError(reason))
        elif session.group.size > 1:
            skip_step(session, check_step(step), CkptError(reason))
        if self._schedule is not None:
            self._schedule.save_skipped(step)

    def save(self, step: int, state: Any, *, blocking: bool = False) -> SaveHandle:
        """Save now. Replaces the step if it is there: after a roll-back the loop comes by again. It comes to every tier."""
        check_switch("blocking", blocking)
        return self._save(step, state, blocking, True)

    def _save(self, step: int, state: Any, blocking: bool, all_tiers: bool, is_loss_finite: bool = False) -> SaveHandle:
        """fit: its loss is finite, so that nobody needs a warning of a NaN in it."""
        options = replace(self._options, nan="allow") if is_loss_finite and self._options.nan == "warn" else self._options
        session, step = self._require_open(), check_step(step)
        began, self._idle_window = time.monotonic(), None
        self._lazy_memory = self._attached_memory()
        if not self._has_restored_or_saved:
            session.lineage.note_joined(step)
            self._has_restored_or_saved = True
        elif self._last_save is not None and step < self._last_save.step:
            session.lineage.note_went_back()
        self._scrubber.note_save_began()
        try:
            with pulses.phase("save"):
                if self._tiers is not None:
                    handle = self._tiers.save(step, state, options, blocking, all_tiers)
                else:
                    handle = run_save(session, state, step, options, blocking)
        except BaseException:
            self._scrubber.note_save_ended(None)
            raise
        handle.when_done(lambda: self._scrubber.note_save_ended(None if handle.failed() else handle.checkpoint().commit))
        if self._heartbeat_page is not None:
            handle.when_done(partial(self._publish_commit, self._heartbeat_page, handle))
        self._last_save, self._last_save_started_at = handle, began
        self._cost_seconds = time.monotonic() - began
        if self._schedule is not None:
            self._schedule.save_started(step, handle)
        return handle

    def _publish_commit(self, page: pulses.HeartbeatPage, handle: SaveHandle) -> None:
        if not handle.failed():
            if self._tiers is None:
                page.publish_durable(handle.step)
            page.publish_committed(handle.step, handle.checkpoint().commit.line)

    def _prepare_staging(self, state: Any) -> None:
        """At the first step that is not saved: the state is complete now, so the memory to stage it can be made ready."""
        self._staging_prepared = True
        with pulses.phase("save"):  # it asks the state's own code, as a save does
            nbytes = staging_bytes(state, self._options, self._require_open().group)
            if nbytes:
                arenas.pool.prepare(nbytes)

    def _is_due(self, step: int) -> bool:
        return self._is_due_nearest(step) or (self._tiers is not None and self._tiers.is_due(step))

    def _is_due_nearest(self, step: int) -> bool:
        every = self._every
        if every is None:
            return False
        if self._schedule is not None:
            due = self._schedule.is_due(step)
            if (missed := self._schedule.take_missed_step()) is not None:
                self._skip_step(missed, "it heard too late that this step was to be saved; name a number of steps as every=")
            return due
        if isinstance(every, int):
            return (step + 1) % every == 0
        elapsed = time.monotonic() - self._last_save_started_at
        return elapsed >= self._interval() and (every != "auto" or self._last_save is None or self._last_save.done())

    def _interval(self) -> float:
        """Seconds between two saves."""
        every: timedelta | Literal["auto"] = self._every if isinstance(self._every, timedelta) else "auto"
        return interval_seconds(every, self._cost_seconds, self._mean_time_to_failure_seconds)

    # --- lazy staging ------------------------------------------------------------------------------------------

    def attach(self, *optimizers: Any) -> None:
        """Let saves copy these optimizers' parameters and moments while the next forward and backward run.

        Each optimizer's step() then waits, if it must, until its memory has been copied. Everything else in the state
        is still copied before `save` returns. A parameter that is changed in place by other means meanwhile makes that
        save fail with StateChanged, if torch counts the change, or if it is one of a whole tensor on the host. What torch does
        not count (`.data`, a numpy view) is not found on a GPU, nor where it is of few elements: see docs/reference/saving.md.
        """
        for optimizer in optimizers:
            inner, hook = _register_step_hook(optimizer, self._before_step)
            self._hooks.append(hook)
            self._attached.append(inner)

    def _before_step(self, *_: Any) -> None:
        if self._session is not None and self._creator_process.is_current:
            (self._tiers or self._session).wait_staged()

    def _attached_memory(self) -> frozenset[int]:
        found: set[int] = set()
        for optimizer in self._attached:
            for group in optimizer.param_groups:
                found.update(map(_data_address, group["params"]))
            for state in optimizer.state.values():
                found.update(_data_address(v) for v in state.values() if hasattr(v, "data_ptr"))
        found.discard(0)
        return frozenset(found)

    def _is_attached(self, leaf: ArrayLeaf) -> bool:
        return leaf.kind == "torch" and leaf.value.data_ptr() in self._lazy_memory

    # --- the end -----------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the saves under way, and until each tier has what is due there; raise SaveFailed if one failed."""
        session = self._require_open()
        with pulses.phase("save"):
            if self._tiers is not None:
                self._tiers.wait(self._progress_callback("save"))
                return
            session.wait()
        session.raise_failed()

    def _progress_callback(self, phase: str) -> Callable[[], None] | None:
        """Says that a long wait goes on."""
        return None if self._heartbeat_page is None else partial(self._heartbeat_page.beat, pulses.PHASES.index(phase))

    def _wait_ignoring_errors(self) -> None:
        """Wait for what is under way, whatever comes of it."""
        (self._tiers.wait_ignoring_errors if self._tiers is not None else self._require_open().wait)()

    def close(self) -> None:
        """Wait for the saves under way, give the repository free, and raise SaveFailed if a save failed.

        With tiers the newest step comes to `url` before. In a forked child nothing is done: the saves are those of its parent.
        """
        self._close(True)

    def _close(self, promote: bool) -> None:
        if self._session is None:
            return
        session, self._session, self._idle_window = self._session, None, None
        if not self._creator_process.is_current:
            return
        if self._heartbeat_page is not None:  # what comes now is no step, and may take longer than one
            self._heartbeat_page.beat(_END)
        for hook in self._hooks:
            hook.remove()
        self._scrubber.close()
        if self._tiers is not None:
            with pulses.phase("end"):
                self._tiers.close(promote, self._progress_callback("end"))
            return
        try:
            session.wait()
            session.raise_failed()
        finally:
            sessions.leave(session)

    def _require_open(self) -> Session:
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
            self.close()  # what it raises takes the place of an exit with status 0
            return
        try:
            self._close(False)  # a program that fails may be restarted, and the restart waits for this one
        except CkptError as failed:  # the error under way is what the user must see
            log.error("%s", failed)


_CONTINUE_HINT = (
    "to go on from the last good step call restore(state) with a lower learning rate or other data, to keep this state all the "
    "same call save(step, state), or give step() no loss="
)


def _register_step_hook(optimizer: Any, before_step: Callable[..., None]) -> tuple[Any, Any]:
    """The optimizer that makes the steps, and the hook before each: of a wrapper, as accelerate's, the one inside of it."""
    inner = optimizer
    while inner is not None:
        try:
            return inner, inner.register_step_pre_hook(before_step)
        except AttributeError:  # also of a wrapper that inherits the method and was never initialized as an optimizer
            inner = getattr(inner, "optimizer", None)
    raise CkptError(f"{type(optimizer).__name__} has no register_step_pre_hook: lazy staging needs a torch optimizer")


def _data_address(tensor: Any) -> int:
    """Where a tensor's memory begins; of a DTensor, the memory of its shard."""
    return int(getattr(tensor, "_local_tensor", tensor).data_ptr())
