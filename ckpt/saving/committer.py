"""The class Committer, which turns the manifest rows of a save attempt into a committed step.

A single process commits its own rows. In a group each rank publishes its rows as a part, and rank 0 merges and commits the
parts.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.errors import Fenced, SignatureError, StepNotFound, StepRefused
from ckpt.format import manifest
from ckpt.format.difference_choice import AutomaticChoices
from ckpt.format.digest import digest
from ckpt.format.json_records import (
    MAX_MANIFEST_BYTES,
    MAX_RECORD_BYTES,
    MAX_TREE_BYTES,
    CommitRecord,
    StepFile,
    encode_commit,
    sign_commit,
)
from ckpt.format.manifest_parquet import write_part
from ckpt.repository import commit_publication
from ckpt.repository.attempt import Attempt
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.completeness import note_complete
from ckpt.repository.file_names import STEPS_FOLDER, step_folder
from ckpt.repository.retention import Keep, has_all_files
from ckpt.saving import commit_wait, failure_reports, rank_part_merge, rank_parts
from ckpt.saving.buffer_merge import warn_of_large_buffers
from ckpt.saving.options import Options
from ckpt.saving.replica_check import PublishedDigests
from ckpt.saving.writer_session import WriterSession
from ckpt.state.tree import FlatState, Node, encode_tree
from ckpt.storage.base.errors import AlreadyExists, CkptError, IntegrityError
from ckpt.storage.base.failpoints import failpoint
from ckpt.support.runtime import collector_paused
from ckpt.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What a commit record counts, over all ranks."""

    leaves: int
    raw_bytes: int
    written_bytes: int


class Committer:
    """Commits one save attempt, or discards it."""

    def __init__(
        self, session: WriterSession, attempt: Attempt, step: int, options: Options, flat: FlatState, digests: PublishedDigests
    ) -> None:
        """flat: the state of this rank. digests: those of its replicas, which `commit` publishes with its rows."""
        self._session = session
        self._attempt = attempt
        self._step = step
        self._options = options
        self._flat = flat
        self._digests = digests
        self._line_saves = session.lineage.begin_save(step)
        self._group = session.group
        self._store = session.repo.store
        # Encoded now and not in the background: the call keeps the GIL for milliseconds, which would delay a training step.
        self._tree = encode_tree(flat.node)
        self._may_part_exist = False
        """True from just before the part is stored: even if the store reports an error, rank 0 may find and commit it."""
        self.needs_failure_report = True
        """Whether a failure must be reported to the other ranks: they do not know the result, and the step is not committed."""
        self.replaced_files: set[str] = set()
        """The files of the earlier save of this step that was replaced."""

    def refuse_existing(self) -> None:
        """Raise AlreadyExists if the step is committed and complete, and not abandoned by a roll-back.

        Raises Fenced instead if a newer writer exists: this writer must stop, and not use another number. Raises SignatureError
        for a step that is not signed with the key of this writer, and StoreError if the store fails.
        """
        if self._has_complete_step() and self._step not in self._session.repo.order().abandoned:
            self._session.writer_lease.require_newest()
            raise AlreadyExists(
                f"step {self._step} of {self._store.url} is committed already; use another number, or overwrite=True"
            )

    def commit(
        self, rows: pa.Table, algorithm: str, packs: dict[str, int], written_bytes: int, *, sharded: bool,
        choices: AutomaticChoices,
    ) -> Checkpoint:  # fmt: skip
        """Commit the rows of an attempt, and return the checkpoint; in a group, publish them as a part and wait for the commit.

        rows: an Arrow table of manifest rows.
        algorithm: of the digests.
        packs: the bytes of each pack to which the rows refer.
        written_bytes: the bytes that this attempt has written into packs.
        sharded: whether rows may be parts of arrays, which must then be checked to cover them.
        choices: what `codec="auto"` chose on this rank. The commit record keeps those of rank 0.

        Raises AlreadyExists if the step exists and may not be replaced, Fenced if a newer writer has taken over, StepRefused if
        the rows are not a complete step, its subclass RanksMissing if ranks are late, and StoreError if the store fails.
        """
        extra = {"format": "1", "digest": algorithm, "step": str(self._step)}
        if self._group.size > 1:
            return self._commit_in_group(rows, extra, packs, written_bytes, choices)
        with collector_paused():
            table = manifest.write_table(rows, extra)
        raw_bytes = sum(leaf.nbytes for leaf in self._flat.leaves.values())
        if sharded:  # the boxes of a single process must cover whole arrays
            raw_bytes = rank_part_merge.require_complete_leaves(table, self._flat.node, self._step, self._store.url)
        totals = StepTotals(len(self._flat.leaves), raw_bytes, written_bytes)
        return self._publish_step(table, self._tree, packs, totals, algorithm, choices)

    def keep_before_commit(self) -> Keep | None:
        """Return which steps a sweep keeps before this attempt is committed; None if it must delete no step.

        After a roll-back, and in a new run, the steps to keep are known only once there is a step on the new training line.
        """
        try:
            newest_line = max(self._session.repo.line_numbers(), default=0)
            return self._options.keep if self._line_saves.line().number == newest_line else None
        except (CkptError, OSError):
            return None

    def _commit_in_group(
        self,
        rows: pa.Table,
        extra: dict[str, str],
        packs: dict[str, int],
        written_bytes: int,
        choices: AutomaticChoices,
    ) -> Checkpoint:
        """Publish the part of this rank; rank 0 then merges all parts and commits, and other ranks wait for the commit."""
        repo, group_lease = self._session.repo, self._session.group_lease
        attempt, timeout = self._attempt, self._options.timeout
        with collector_paused():
            metadata = rank_parts.part_metadata(self._tree, self._flat, packs, written_bytes, group_lease, self._digests)
            data = write_part(rows, {**extra, **metadata})
        self._may_part_exist = True
        rank_parts.publish_part(repo, attempt, data)
        if group_lease.rank:
            self.needs_failure_report = False
            commit = commit_wait.await_commit(repo, group_lease, self._group, attempt, 2 * timeout)
            return repo.checkpoint(commit, group_lease.rank)
        merged = rank_part_merge.merge_parts(
            repo, self._step, commit_wait.gather_parts(repo, group_lease, self._group, attempt, timeout)
        )
        self._session.drift.check(self._step, merged.tree, self._previous_step_tree)
        self._session.pin_packs(attempt, merged.packs)
        rank_parts.require_packs(self._store, self._step, merged.packs)
        with collector_paused():
            table = manifest.write_table(merged.table, {**extra, "digest": merged.algorithm})
            tree = encode_tree(merged.tree, merged.buffers.layouts)
            totals = StepTotals(*rank_part_merge.totals(merged.table), merged.written_bytes)
        checkpoint = self._publish_step(table, tree, merged.packs, totals, merged.algorithm, choices)
        self.needs_failure_report = False
        warn_of_large_buffers(self._step, self._store.url, merged.buffers.warning)
        with suppress(CkptError, OSError):  # if this fails, a sweep of the next generation deletes them
            self._store.delete(merged.part_files)
        return checkpoint

    def _previous_step_tree(self) -> tuple[int, Node] | None:
        """Return the newest committed step with a lower number, and its tree for all ranks; None if there is none."""
        repo = self._session.repo
        for number in reversed(repo.order().steps):
            if number < self._step:
                with suppress(StepNotFound):  # a folder of an attempt that has failed
                    return number, Checkpoint(self._store, repo.commit(number)).tree_of_all_ranks()
        return None

    def _publish_step(
        self, table: bytes, tree: bytes, packs: dict[str, int], totals: StepTotals, algorithm: str,
        choices: AutomaticChoices,
    ) -> Checkpoint:  # fmt: skip
        """Write manifest, tree and commit record, in this order; return the checkpoint.

        The commit record makes the step exist. A crash before it leaves files that the next sweep deletes.
        """
        line = self._line_saves.line()
        folder = f"{step_folder(self._step)}/manifest/{self._attempt.name}"
        advice = "put long lists and dicts of plain values into arrays"
        self._require_loadable("manifest", table, MAX_MANIFEST_BYTES, advice)
        self._require_loadable("description of the state", tree, MAX_TREE_BYTES, advice)
        files = {f"{folder}.parquet": table, f"{folder}.json": tree}
        failpoint("save.manifest")
        for name, data in files.items():
            self._store.put(name, data)
        records = [StepFile(name, len(data), digest(algorithm, data).hex()) for name, data in files.items()]
        commit = CommitRecord(
            step=self._step,
            generation=self._session.writer_lease.generation,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            world_size=self._group.size,
            manifests=(records[0],),
            trees=(records[1],),
            packs=tuple(StepFile(name, nbytes) for name, nbytes in packs.items()),
            leaves=totals.leaves,
            raw_bytes=totals.raw_bytes,
            written_bytes=totals.written_bytes,
            attempt=self._attempt.number,
            next_save=None if self._options.propose_next_step is None else self._options.propose_next_step(),
            version=__version__,
            line=line.number,
            left=line.ancestry,
            codec_choices=choices.codecs,
            difference_choices=choices.differences,
        )
        commit = sign_commit(commit, self._session.repo.keys)
        advice = f"it refers to {len(packs)} packs, so save to a new URL, where it refers to fewer"
        self._require_loadable("commit record", encode_commit(commit), MAX_RECORD_BYTES, advice)
        failpoint("save.commit")
        if line.number:
            self._session.record_line(line)
        commit_publication.publish_commit(self._session.repo, self._session.writer_lease, commit, self._require_replaceable)
        failpoint("save.committed")
        note_complete(commit)
        return self._session.repo.checkpoint(commit, self._group.rank)

    def _require_loadable(self, what: str, data: bytes, max_bytes: int, advice: str) -> None:
        """Raise StepRefused if no load would accept this file of the step."""
        if len(data) > max_bytes:
            raise StepRefused(
                f"step {self._step}: its {what} has {len(data)} bytes, more than the limit of {max_bytes}: {advice}"
            )

    def _require_replaceable(self, existing: CommitRecord | None) -> None:
        """Raise AlreadyExists or Fenced if the existing record must stay; otherwise note the files of its save."""
        if not self._options.overwrite:
            self.refuse_existing()
        if existing is not None and existing.step == self._step:
            if existing.generation > self._session.writer_lease.generation:
                raise Fenced(f"a newer job has saved step {self._step} of {self._store.url}; stop this job")
            self.replaced_files.update(existing.files())

    def _has_complete_step(self) -> bool:
        """Return whether the step is committed and its files are complete. A damaged step is logged."""
        try:
            commit = self._session.repo.commit(self._step)
            Checkpoint(self._store, commit).require_complete()
        except StepNotFound:
            self._session.writer_lease.require_newest()  # raises if the whole repository was removed
            return False
        except SignatureError:  # a step that was saved without a key is not damaged, and must not be replaced by default
            raise
        except IntegrityError as error:  # no other error: a step that can't be read now may be complete
            log.warning("step %d is damaged and will be replaced: %s", self._step, error)
            return False
        sizes = {entry.name: entry.nbytes for entry in self._store.list(STEPS_FOLDER)}
        return has_all_files(commit, sizes)

    def discard(self, error: BaseException) -> None:
        """Delete the files of a failed attempt, unless its step turns out to be committed, and set `needs_failure_report`.

        The next sweep deletes the files that can't be deleted now.
        """
        is_refused = isinstance(error, StepRefused) and error.is_certain
        if self._may_part_exist and self._group.rank and not is_refused:
            return  # rank 0 may have this rank's part, and may still commit it
        # Until the record is read, the step may be committed: report no failure.
        self.needs_failure_report = self.needs_failure_report and not self._may_part_exist
        is_outcome_known = False
        with suppress(CkptError, OSError):
            repo, lease = self._session.repo, self._session.writer_lease
            if commit_publication.settle_attempt(repo, lease, self._attempt):
                self.needs_failure_report = False
                return  # only the reply was lost
            self.needs_failure_report, is_outcome_known = True, True
            commit_publication.delete_files(repo, lease, self._attempt)
        if not is_outcome_known and self._may_part_exist and self._group.size > 1:
            failure_reports.leave_uncertainty_note(self._store, self._session.group_lease, self._group, self._attempt, error)
