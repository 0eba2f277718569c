"""Making a step exist: from the rows of what a rank has written to the commit record that all can see.

A single process commits its own rows. In a group each rank leaves them as its part, and rank 0 puts the parts together.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from typing import Any

from ckpt.errors import Fenced, RanksMissing, SignatureError, StepNotFound, StepRefused
from ckpt.format import manifest
from ckpt.format.digest import digest
from ckpt.format.json_records import MAX_MANIFEST_BYTES, MAX_TREE_BYTES, CommitRecord, FileRecord, sign_commit
from ckpt.format.manifest_parquet import write_part
from ckpt.repository import commit_publication
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.completeness import note_complete
from ckpt.repository.repository import step_folder
from ckpt.repository.retention import has_all_files
from ckpt.repository.writer_lease import Attempt
from ckpt.saving import rank_parts
from ckpt.saving.options import Options
from ckpt.saving.replica_check import PublishedDigests
from ckpt.saving.writer_session import Session
from ckpt.state.tree import FlatState, encode_tree
from ckpt.storage.base.errors import AlreadyExists, CkptError, IntegrityError, NotFound
from ckpt.storage.base.failpoints import failpoint
from ckpt.support.runtime import collector_paused
from ckpt.version import __version__

log = logging.getLogger("ckpt")


class Committer:
    """Of one attempt at one step."""

    def __init__(
        self, session: Session, attempt: Attempt, step: int, options: Options, flat: FlatState, digests: PublishedDigests
    ) -> None:
        self._session = session
        self._attempt = attempt
        self._step = step
        self._options = options
        self._flat = flat
        self._digests = digests
        self._segment = session.lineage.begin_save(step)
        self._group = session.group
        self._store = session.repo.store
        # Here and not in the background: one call that holds the GIL for milliseconds, which a training step would feel.
        self._tree = encode_tree(flat.node)
        self._is_part_offered = False  # our part may be in the store, whatever its put said: rank 0 may commit it
        self.is_outcome_reported = False
        """The other ranks need no word of how this attempt went."""
        self.replaced_files: set[str] = set()
        """Files of what was committed as this step before."""

    def refuse_existing(self) -> None:
        """Raise AlreadyExists where the step is committed, whole, and not abandoned by a roll-back; Fenced where a newer writer
        is there, for this one is to stop and not to take another number."""
        if self._has_intact_step() and self._step not in self._session.repo.order().abandoned:
            self._session.lease.writer.require_newest()
            raise AlreadyExists(
                f"step {self._step} of {self._store.url} is committed already; use another number, or overwrite=True"
            )

    def commit(self, rows: Any, algorithm: str, packs: dict[str, int], written_bytes: int, *, sharded: bool) -> Checkpoint:
        """Commit an Arrow table of rows, or as a rank of a group see to it that they are.

        packs: all that the rows refer to, with their lengths; written: bytes of those that this attempt has made;
        sharded: the rows may be of parts of arrays.
        """
        extra = {"format": "1", "digest": algorithm, "step": str(self._step)}
        if self._group.size > 1:
            return self._commit_in_group(rows, extra, packs, written_bytes)
        with collector_paused():
            table = manifest.write_table(rows, extra)
        raw_bytes = sum(leaf.nbytes for leaf in self._flat.leaves.values())
        if sharded:  # some boxes only: they must make whole arrays all the same
            raw_bytes = rank_parts.require_complete_leaves(table, self._flat.node, self._step, self._store.url)
        return self._publish_step(table, self._tree, packs, len(self._flat.leaves), raw_bytes, written_bytes, algorithm)

    def _commit_in_group(self, rows: Any, extra: dict[str, str], packs: dict[str, int], written_bytes: int) -> Checkpoint:
        """Leave this rank's part; rank 0 waits for all and commits, the others wait for that."""
        repo, lease, attempt, timeout = self._session.repo, self._session.lease, self._attempt, self._options.timeout
        with collector_paused():
            metadata = rank_parts.part_metadata(self._tree, self._flat, packs, written_bytes, lease, self._digests)
            data = write_part(rows, {**extra, **metadata})
        self._is_part_offered = True
        rank_parts.publish_part(repo, attempt, data)
        if lease.rank:
            self.is_outcome_reported = True
            commit = rank_parts.await_commit(repo, lease, self._group, attempt, 2 * timeout)
            return repo.checkpoint(commit, lease.rank)
        merged = rank_parts.merge_parts(repo, self._step, rank_parts.gather_parts(repo, lease, self._group, attempt, timeout))
        self._session.drift.check(self._step, merged.tree, self._previous_step_tree)
        self._session.pin_packs(attempt, merged.packs)
        rank_parts.require_packs(self._store, self._step, merged.packs)
        with collector_paused():
            table = manifest.write_table(merged.table, {**extra, "digest": merged.algorithm})
            tree = encode_tree(merged.tree)
            leaves, raw_bytes = rank_parts.totals(merged.table)
        checkpoint = self._publish_step(table, tree, merged.packs, leaves, raw_bytes, merged.written_bytes, merged.algorithm)
        self.is_outcome_reported = True
        with suppress(CkptError, OSError):  # the next generation's sweep takes them otherwise
            self._store.delete(merged.part_files)
        return checkpoint

    def _previous_step_tree(self) -> tuple[int, Any] | None:
        """The newest step below this one, and its tree for all ranks."""
        repo = self._session.repo
        number = next((n for n in reversed(repo.order().steps) if n < self._step), None)
        if number is None:
            return None
        commit = repo.commit(number)
        return number, json.loads(Checkpoint(self._store, commit).verified(commit.trees[0]))["tree"]

    def _publish_step(
        self, table: bytes, tree: bytes, packs: dict[str, int], leaves: int, raw_bytes: int, written_bytes: int, algorithm: str
    ) -> Checkpoint:
        """Make the step exist: manifest, tree, commit record. algorithm: of digests."""
        line = self._segment.line()
        folder = f"{step_folder(self._step)}/manifest/{self._attempt.name}"
        for what, data, max_bytes in (
            ("manifest", table, MAX_MANIFEST_BYTES),
            ("description of the state", tree, MAX_TREE_BYTES),
        ):
            if len(data) > max_bytes:  # no load would take it
                raise StepRefused(
                    f"step {self._step}: its {what} has {len(data)} bytes, and {max_bytes} are the most: put long lists and "
                    "dicts "
                    "of plain values into arrays"
                )
        files = {f"{folder}.parquet": table, f"{folder}.json": tree}
        failpoint("save.manifest")
        for name, data in files.items():
            self._store.put(name, data)
        records = [FileRecord(name, len(data), digest(algorithm, data).hex()) for name, data in files.items()]
        commit = CommitRecord(
            step=self._step,
            generation=self._session.lease.writer.generation,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            world_size=self._group.size,
            manifests=(records[0],),
            trees=(records[1],),
            packs=tuple(FileRecord(name, nbytes) for name, nbytes in packs.items()),
            leaves=leaves,
            raw_bytes=raw_bytes,
            written_bytes=written_bytes,
            attempt=self._attempt.number,
            next_save=None if self._options.propose_next_step is None else self._options.propose_next_step(),
            version=__version__,
            line=line.number,
            left=line.ancestry,
        )
        commit = sign_commit(commit, self._session.repo.keys)
        failpoint("save.commit")
        if line.number:
            self._session.note_line(line)
        commit_publication.publish_commit(self._session.repo, self._session.lease.writer, commit, self._require_replaceable)
        failpoint("save.committed")
        note_complete(commit)
        return self._session.repo.checkpoint(commit, self._group.rank)

    def _require_replaceable(self, existing: CommitRecord | None) -> None:
        if not self._options.overwrite:
            self.refuse_existing()
        if existing is not None and existing.step == self._step:
            if existing.generation > self._session.lease.writer.generation:
                raise Fenced(f"step {self._step} of {self._store.url} was saved by a newer job meanwhile; stop this one")
            self.replaced_files.update(existing.files())

    def _has_intact_step(self) -> bool:
        try:
            commit = self._session.repo.commit(self._step)
            Checkpoint(self._store, commit).require_complete()
        except StepNotFound:
            self._session.lease.writer.require_newest()  # raises where the whole repository was removed
            return False
        except SignatureError:  # a step that was saved without a key is not damaged, and nothing replaces it unasked
            raise
        except IntegrityError as error:  # and nothing else: what can't be read just now may be whole
            log.warning("step %d is damaged and will be replaced: %s", self._step, error)
            return False
        sizes = {e.name: e.nbytes for e in self._store.list("steps")}
        return has_all_files(commit, sizes)

    def discard(self, error: BaseException) -> None:
        """Remove what this attempt has written; what can't be removed now, the next sweep takes."""
        refused = isinstance(error, StepRefused) and (not isinstance(error, RanksMissing) or error.given_up)
        if self._is_part_offered and self._group.rank and not refused:
            return  # rank 0 may have our part, and commit it yet
        folder = f"{step_folder(self._step)}/"
        name = f"/{self._attempt.name}"
        self.is_outcome_reported = (
            self.is_outcome_reported or self._is_part_offered
        )  # until the record was read: do not say that it failed before it is known
        is_outcome_known = False
        with suppress(CkptError, OSError):
            try:
                if any(name in f.name for f in self._session.repo.commit(self._step).manifests):
                    self.is_outcome_reported = is_outcome_known = True
                    return  # committed after all, and only the answer got lost
            except (StepNotFound, NotFound):
                self._session.repo.identity()  # raises where the whole repository was removed: nothing is written there again
            self.is_outcome_reported, is_outcome_known = False, True
            to_delete = [e.name for e in self._store.list(folder.rstrip("/")) if name in e.name and "failed" not in e.name]
            self._store.delete(to_delete)
        if not is_outcome_known and self._is_part_offered and self._group.size > 1:
            rank_parts.note_unknown_outcome(self._store, self._session.lease, self._group, self._attempt, error)
