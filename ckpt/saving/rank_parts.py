"""The rank parts: files in the store by which the ranks of a group make one step, which rank 0 commits.

A part is a file `steps/<step>/part/<rank>-<generation>-<serial>-<number>-<digest>.arrow`. It contains the manifest rows of the
rank, with its tree and its packs in the metadata. It is written when those packs are durable. Rank 0 waits for the parts of all
ranks, of its own generation and of the same attempt, merges them and commits. The others wait for the commit record. A rank
that fails writes `…-failed.json` with the reason instead, so that the committer stops waiting for it. From rank 0, that file
means that the attempt is abandoned. The same report goes through the group as a note, because the store itself may fail.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ckpt.errors import RanksMissing, SignatureError, StepRefused, UnsupportedLeaf
from ckpt.format import json_records
from ckpt.format.digest import digest
from ckpt.format.json_records import CommitRecord
from ckpt.format.pack import file_lengths
from ckpt.groups.base import Group, ranks_text
from ckpt.repository.group_lease import GroupLease
from ckpt.repository.repository import Repository, step_folder
from ckpt.repository.writer_lease import Attempt
from ckpt.saving.replica_check import (
    PublishedDigests,
    ReplicaDigests,
    agreed_descriptions,
    describe_leaves,
    describe_sharers,
    missing_copies_text,
    require_equal_replicas,
    require_equal_samples,
)
from ckpt.state.rank_tree import keep_stored_arrays, merge_trees
from ckpt.state.tree import FlatState, Node
from ckpt.storage.base.errors import CkptError, IntegrityError, NotFound, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import Store
from ckpt.storage.base.threads import DaemonThreadPool
from ckpt.support import arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("ckpt")

TIMEOUT_SECONDS = 600.0
"""How long the committer waits for the last rank. The other ranks wait twice as long for the commit."""

_POLL_SECONDS = (0.002, 0.5)  # the first and the longest interval between two polls
_FENCE_CHECK_SECONDS = 1.0  # the interval between two checks for a newer generation
T = TypeVar("T")

_READ_THREADS = 8  # parts are read in parallel, because a remote store has a high latency

_PART_NAME = re.compile(
    r"(?P<rank>\d+)-(?P<generation>\d+)-(?P<serial>\d+)-(?P<number>\d+)-(?:(?P<digest>[0-9a-f]{32}|[0-9a-f]{64})\.arrow|failed\.json)"
)


class ListedPart(NamedTuple):
    """A file in the part folder of a step, as its name describes it."""

    name: str
    rank: int
    digest: str | None
    """xxh3-128 of the file, or its HMAC if the rank has a key. None for the report of a rank that failed."""


@dataclass(frozen=True, slots=True)
class MergedStep:
    """A step merged from the parts of all ranks."""

    table: pa.Table
    tree: Node
    packs: dict[str, int]
    """The bytes of each pack, by name."""
    written_bytes: int
    algorithm: str
    part_files: list[str]
    """The files of the parts, which nobody needs after the commit."""


# --- what each rank publishes ----------------------------------------------------------------------------------


def part_metadata(
    tree: bytes, flat: FlatState, packs: Mapping[str, int], written_bytes: int, lease: GroupLease, digests: PublishedDigests
) -> dict[str, str]:
    """Return the metadata of a part: the tree, descriptions of the leaves, the packs and the digests of replicas."""
    return {
        "tree": tree.decode(),
        "held": describe_leaves(flat),
        "sharers": describe_sharers(flat),
        "packs": json.dumps(dict(packs)),
        "written_bytes": str(written_bytes),
        "world_size": str(lease.size),
        **digests.metadata(flat),
    }


def publish_part(repo: Repository, attempt: Attempt, table: bytes) -> None:
    """Write a part into the store. The packs that it names must be durable."""
    failpoint("ranks.part")
    stem = _part_stem(attempt)
    signature = repo.keys.sign("part", _signed_bytes(stem, table))
    named = digest("xxh3-128", table).hex() if signature is None else signature.hmac_sha256
    repo.store.put(f"{stem}-{named}.arrow", table)


def _signed_bytes(stem: str, table: bytes) -> bytes:
    """Return the bytes that the HMAC in a part's name covers: rank, attempt and step too, so that no other part matches."""
    return b"\n".join((stem.encode(), table))


def publish_failure(store: Store, lease: GroupLease, group: Group, attempt: Attempt, error: BaseException) -> None:
    """Report that this rank will write no part: first to the group, because the store may take long to fail."""
    reason = str(error) or type(error).__name__
    unreachable = isinstance(error, (StoreError, OSError))
    if unreachable and store.url not in reason:
        reason = f"{store.url}: {reason}"
    # For another rank, the committer adds this text. Other errors of rank 0 already describe what is wrong with all ranks.
    if attempt.rank == 0 and (unreachable or isinstance(error, UnsupportedLeaf) or not isinstance(error, CkptError)):
        reason = _give_up_reason(attempt, 0, reason)
    failure = {"reason": reason, "missing": isinstance(error, RanksMissing), "rank": attempt.rank}
    data = json_records.encode("failure", failure)
    group.leave_note(_note_key(lease, attempt, attempt.rank == 0), data)
    store.put(f"{_part_stem(attempt)}-failed.json", data)


def note_unknown_outcome(store: Store, lease: GroupLease, group: Group, attempt: Attempt, error: BaseException) -> None:
    """Report, from rank 0, that the store failed during the commit, so that the other ranks check the record once more."""
    reason = (
        f"rank 0 failed while it committed step {attempt.step} of {store.url}, and can't find out whether the step exists: "
        f"{error}"
    )
    failure = {"reason": reason, "missing": False, "rank": 0}
    group.leave_note(_note_key(lease, attempt, True), json_records.encode("failure", failure))


def note_ended(lease: GroupLease, group: Group) -> None:
    """Report through the group that this rank saves no more, in case the store can't be reached."""
    if group.size > 1:
        group.leave_note(_end_key(lease, lease.rank == 0), str(lease.rank).encode())


def _note_key(lease: GroupLease, attempt: Attempt, from_rank_0: bool) -> str:
    """Return the key of a note about an attempt, from rank 0 to all or from another rank to rank 0."""
    return f"{lease.writer.token}/{lease.number}/{attempt.step}/{attempt.number}/{'given-up' if from_rank_0 else 'failed'}"


def _end_key(lease: GroupLease, from_rank_0: bool) -> str:
    return f"{lease.writer.token}/{lease.number}/ended{'-0' if from_rank_0 else ''}"


def _noted_failure(lease: GroupLease, group: Group, attempt: Attempt) -> StepRefused | None:
    """Return the error in a note about this attempt: on rank 0 of another rank that failed, elsewhere of rank 0."""
    data = group.note(_note_key(lease, attempt, lease.rank != 0))
    if data is None:
        return None
    try:
        failure = json_records.decode("failure", data, "a note of another rank")
        reason, missing, rank = str(failure["reason"]), bool(failure["missing"]), int(failure["rank"])
    except (CkptError, KeyError, TypeError, ValueError) as error:
        log.debug("ignoring a note of another rank: %s", error)
        return None
    if lease.rank == 0:
        return StepRefused(_give_up_reason(attempt, rank, reason))
    return _refusal(reason, missing)


def _give_up_reason(attempt: Attempt, rank: int, reason: object) -> str:
    return f"step {attempt.step} is given up because rank {rank} failed: {reason}"


def _part_folder(step: int) -> str:
    return f"{step_folder(step)}/part"


def _part_stem(attempt: Attempt) -> str:
    return f"{_part_folder(attempt.step)}/{attempt.name}-{attempt.number}"


def _list_parts(store: Store, attempt: Attempt) -> Iterator[ListedPart]:
    """Yield the parts and failure reports of this attempt in the store."""
    for entry in store.list(_part_folder(attempt.step)):
        found = _PART_NAME.fullmatch(entry.name.rpartition("/")[2])
        if found and (int(found["generation"]), int(found["number"])) == (attempt.generation, attempt.number):
            yield ListedPart(entry.name, int(found["rank"]), found["digest"])


def _other_step_text(store: Store, attempt: Attempt, ranks: Collection[int]) -> str:
    """Return a text that names another, uncommitted step for which one of these ranks has written a part; "" if none."""
    newest: dict[int, tuple[int, int]] = {}
    with suppress(CkptError):  # the error to report is that these ranks are missing
        names = {entry.name for entry in store.list("steps")}
        for name in names:
            folder, _, file = name.partition("/part/")
            part = _PART_NAME.fullmatch(file)
            if part is None or int(part["generation"]) != attempt.generation or f"{folder}/commit.json" in names:
                continue
            rank, step = int(part["rank"]), int(folder.removeprefix("steps/"))
            if rank in ranks and step != attempt.step:
                newest[rank] = max(newest.get(rank, (-1, -1)), (int(part["serial"]), step))
    return f" (rank {min(newest)} has come with step {newest[min(newest)][1]})" if newest else ""


def _read_failure(store: Store, name: str) -> StepRefused:
    """Return the error that a rank has reported instead of its part."""
    try:
        failure = json_records.load(store, "failure", name)
        return _refusal(str(failure["reason"]), bool(failure.get("missing")))
    except (NotFound, IntegrityError, KeyError) as error:
        return StepRefused(str(error))


def _refusal(reason: str, missing: bool) -> StepRefused:
    if not missing:
        return StepRefused(reason)
    error = RanksMissing(reason)
    error.given_up = True
    return error


# --- the committer ---------------------------------------------------------------------------------------------


def gather_parts(
    repo: Repository, lease: GroupLease, group: Group, attempt: Attempt, timeout_seconds: float
) -> list[ListedPart]:
    """Wait for the parts of all ranks, and return them in the order of the ranks.

    Raises StepRefused if a rank reports that it failed, RanksMissing after `timeout_seconds` or if a rank has ended its saves,
    and Fenced if a newer generation has begun.
    """
    found: dict[int, ListedPart] = {}

    def find_all_parts() -> list[ListedPart] | None:
        for part in _list_parts(repo.store, attempt):
            if part.digest is None and part.rank != lease.rank:
                reason = _read_failure(repo.store, part.name)
                raise StepRefused(_give_up_reason(attempt, part.rank, reason))
            found[part.rank] = part
        return [found[rank] for rank in sorted(found)] if len(found) == lease.size else None

    def missing_error(missing: Sequence[int], why: str) -> RanksMissing:
        one, instead = len(missing) == 1, _other_step_text(repo.store, attempt, missing)
        return RanksMissing(
            f"{ranks_text(missing)} of {lease.size} did not bring {'its' if one else 'their'} part of step {attempt.step} "
            f"{why}; every rank of the group must save the same steps{instead}. Look at the log of "
            f"{'that rank' if one else 'those ranks'}; to save from one rank alone pass group=None"
        )

    def give_up_error() -> StepRefused | None:
        if (noted := _noted_failure(lease, group, attempt)) is not None:
            return noted
        # Read before the parts are listed: those of an ended rank are stored by now.
        ended = lease.ended_ranks() | _ended_ranks(lease, group)
        if ended and find_all_parts() is None and (missing := sorted(ended - found.keys())):
            return missing_error(missing, f"and {'has' if len(missing) == 1 else 'have'} ended")
        return None

    failpoint("ranks.gather")
    parts = _poll(find_all_parts, lease, timeout_seconds, give_up_error)
    if parts is None:
        raise missing_error([rank for rank in range(lease.size) if rank not in found], f"within {timeout_seconds:g} s")
    return parts


def _ended_ranks(lease: GroupLease, group: Group) -> set[int]:
    """Return the rank that has ended its saves by a note: on rank 0 one of the others, elsewhere rank 0."""
    text = group.note(_end_key(lease, lease.rank != 0)) or b""
    return {int(text)} if text.isdigit() else set()


def merge_parts(repo: Repository, step: int, listed: Sequence[ListedPart]) -> MergedStep:
    """Read, verify and merge the parts; raise StepRefused if they do not make a whole step."""
    with _naming_step(step):
        return _merge_parts(repo, listed)


@contextmanager
def _naming_step(step: int) -> Iterator[None]:
    """Add the number of the step to the message of StepRefused."""
    try:
        yield
    except StepRefused as error:
        raise StepRefused(f"step {step}: {error}") from None


def _merge_parts(repo: Repository, listed: Sequence[ListedPart]) -> MergedStep:
    from ckpt.saving.manifest_merge import merge_rows

    failpoint("ranks.merge")
    tables = _read_parts(repo, listed)
    trees: dict[str, tuple[list[int], Node]] = {}
    packs: dict[str, int] = {}
    written = 0
    algorithms: dict[str, int] = {}
    sizes: dict[str, int] = {}
    description_texts: dict[str, int] = {}
    sharer_texts: dict[str, list[int]] = {}
    verify: dict[str, list[int]] = {}
    copies: list[tuple[int, ReplicaDigests]] = []
    samples: dict[tuple[str, str], list[int]] = {}
    for part, table in zip(listed, tables, strict=True):
        metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        if metadata["tree"] in trees:
            trees[metadata["tree"]][0].append(part.rank)
        else:
            trees[metadata["tree"]] = ([part.rank], json.loads(metadata["tree"])["tree"])
        packs.update(json.loads(metadata["packs"]))
        written += int(metadata["written_bytes"])
        algorithms.setdefault(metadata["digest"], part.rank)
        sizes.setdefault(metadata["world_size"], part.rank)
        description_texts.setdefault(metadata["held"], part.rank)
        sharer_texts.setdefault(metadata["sharers"], []).append(part.rank)
        verify.setdefault(metadata.get("verify", "false"), []).append(part.rank)
        copies.append((part.rank, json.loads(metadata.get("copies", "[]"))))
        samples.setdefault((metadata["held"], metadata.get("samples", "")), []).append(part.rank)
    ranks = [part.rank for part in listed]
    _require_same_value("digests by", algorithms)
    _require_same_value("counts its group as", sizes)
    _require_same_verify(verify)
    descriptions = agreed_descriptions(description_texts)
    require_equal_replicas(copies)
    if cause := missing_copies_text(
        sharer_texts, lambda names: _ranks_storing(names, ranks, tables)
    ):  # checked before the boxes: a missing replica may leave a gap in any leaf
        raise StepRefused(cause)
    require_equal_samples(samples)
    table = merge_rows(
        [(rank, table.replace_schema_metadata(None)) for rank, table in zip(ranks, tables, strict=True)], descriptions
    )
    tree = keep_stored_arrays(merge_trees(list(trees.values())), _leaf_names(table))
    return MergedStep(table, tree, packs, written, next(iter(algorithms)), [part.name for part in listed])


def _read_parts(repo: Repository, listed: Sequence[ListedPart]) -> list[Any]:
    """Read the tables of the parts with several threads."""
    with DaemonThreadPool(min(_READ_THREADS, len(listed) or 1), "ckpt-parts") as pool:
        return list(pool.map(lambda part: _read_part(repo, part), listed))


def _read_part(repo: Repository, part: ListedPart) -> Any:
    from ckpt.format.manifest_parquet import read_part

    where = f"{repo.url}/{part.name}"
    data = repo.store.get_up_to(part.name, json_records.MAX_PART_BYTES)
    stem, _, code = part.name.removesuffix(".arrow").rpartition("-")
    is_signed = len(code) == 64
    if is_signed and not repo.keys:
        raise StepRefused(f"rank {part.rank} signs with a key, and rank 0 has none; give all ranks the same key")
    if not is_signed and repo.keys:
        raise SignatureError(f"{where} has no signature: rank {part.rank} has no key; give all ranks the same key")
    signer = next((key for key in repo.keys if hmac.compare_digest(key.code("part", _signed_bytes(stem, data)), code)), None)
    if is_signed and signer is None:
        raise SignatureError(
            f"{where} is not signed with a key of rank 0: rank {part.rank} has another key, or the file was changed; give all "
            "ranks the same key, and save the step again"
        )
    if not is_signed and digest("xxh3-128", data).hex() != code:
        raise IntegrityError(f"{where} is damaged: its digest is not that of its name; save the step again")
    return read_part(data, where)


def _require_same_value(what: str, rank_by_value: dict[str, int]) -> None:
    if len(rank_by_value) > 1:
        (a, first), (b, second) = list(rank_by_value.items())[:2]
        raise StepRefused(f"rank {first} {what} {a}, rank {second} {b}; every rank must save with the same options")


def _require_same_verify(ranks_by_option: Mapping[str, Sequence[int]]) -> None:
    """Raise StepRefused if verify_replicas differs between ranks: digests can be compared only if all ranks made the same."""
    if len(ranks_by_option) > 1:
        options = sorted(ranks_by_option.items(), reverse=True)
        chosen = ", ".join(f"{json.loads(option)} on {ranks_text(ranks)}" for option, ranks in options)
        raise StepRefused(f"verify_replicas={chosen}; every rank must save with the same options")


def _ranks_storing(names: Collection[str], ranks: Sequence[int], tables: Sequence[pa.Table]) -> dict[str, set[int]]:
    """Return, for each of these leaves, the ranks that have stored a part of it."""
    found: dict[str, set[int]] = {}
    for rank, table in zip(ranks, tables, strict=True):
        for name in _leaf_names(table) & set(names):
            found.setdefault(name, set()).add(rank)
    return found


def _leaf_names(table: pa.Table) -> set[str]:
    return set(arrow_columns.compute_function("unique", table["leaf"]).to_pylist())


def totals(table: pa.Table) -> tuple[int, int]:
    """Return the number of leaves of a merged table, and their bytes."""
    return len(_leaf_names(table)), int(np.sum(arrow_columns.numpy_array(table["nbytes"])))


def require_complete_leaves(data: bytes, tree: Node, step: int, where: str) -> int:
    """Return the bytes of the leaves of a single process; raise StepRefused if its shards do not make whole leaves."""
    from ckpt.format.manifest import read_table
    from ckpt.saving.manifest_merge import merge_rows

    with _naming_step(step):
        table = merge_rows([(0, read_table(data, where))])
        keep_stored_arrays(tree, _leaf_names(table))
    return totals(table)[1]


def require_packs(store: Store, step: int, packs: Mapping[str, int]) -> None:
    """Raise StepRefused if a pack that the step would name is missing or has another length."""
    stored_bytes = file_lengths(store, packs)
    for name, nbytes in packs.items():
        if stored_bytes.get(name) != nbytes:
            raise StepRefused(f"step {step} refers to {store.url}/{name}, which is missing or cut; save the step again")


# --- the other ranks -------------------------------------------------------------------------------------------


def await_commit(repo: Repository, lease: GroupLease, group: Group, attempt: Attempt, timeout_seconds: float) -> CommitRecord:
    """Wait until rank 0 has committed this attempt, and return the commit record.

    Raises StepRefused with the reason if rank 0 abandons the attempt, RanksMissing if rank 0 does neither within
    `timeout_seconds`, and Fenced if a newer generation has begun.
    """

    def find_commit() -> CommitRecord | None:
        # Listed before the record is read: rank 0 abandons only an attempt that it has not committed.
        listed = list(_list_parts(repo.store, attempt))
        try:
            commit = repo.record(attempt.step)
            if (commit.generation, commit.attempt) == (attempt.generation, attempt.number):
                return commit
        except (NotFound, IntegrityError):
            pass
        for part in listed:
            if part.rank == 0 and part.digest is None:
                raise _read_failure(repo.store, part.name)
        return None

    def give_up_error() -> StepRefused | None:
        if (noted := _noted_failure(lease, group, attempt)) is not None:
            return noted
        if _ended_ranks(lease, group):
            return RanksMissing(f"rank 0 of {lease.size} has ended its saves: no step can be committed any more")
        return lease.rank_0_error()

    commit = _poll(find_commit, lease, timeout_seconds, give_up_error)
    if commit is None:
        raise RanksMissing(
            f"rank 0 of {lease.size} has not committed step {attempt.step} within {timeout_seconds:g} s; look at its log. "
            f"Every rank of the group must save the same steps{_other_step_text(repo.store, attempt, [0])}; to save from one "
            "rank alone pass group=None"
        )
    return commit


def _poll(
    find: Callable[[], T | None], lease: GroupLease, timeout_seconds: float, give_up_error: Callable[[], StepRefused | None]
) -> T | None:
    """Poll `find` at growing intervals, and return its first result; None after `timeout_seconds`.

    Raises Fenced if a newer generation has begun, StoreError if the repository is gone, and the error of `give_up_error`.
    Before it raises, it calls `find` once more.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = _POLL_SECONDS[0]
    next_fence_check = time.monotonic() + _FENCE_CHECK_SECONDS
    while True:
        if (found := find()) is not None:
            return found
        lease.progress_count += 1
        now = time.monotonic()
        if now >= deadline:
            return None
        if now >= next_fence_check:
            next_fence_check = now + _FENCE_CHECK_SECONDS
            hopeless = lease.writer.lease_error() or give_up_error()
            if hopeless is not None:
                if (found := find()) is not None:
                    return found
                raise hopeless
        time.sleep(min(pause, max(0.0, deadline - now)))
        pause = min(pause * 1.5, _POLL_SECONDS[1])
