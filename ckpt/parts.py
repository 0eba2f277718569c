"""How the ranks of a group make one step without talking: each leaves its part in the store, and one of them commits.

A part is a file `steps/<step>/part/<rank>-<generation>-<serial>-<number>-<digest>.arrow`: the rows of what the rank has
written, with its tree and its packs in the metadata. It is written when those packs are durable. Rank 0 waits for the parts
of all ranks, of its own generation and of the same try of the step, merges and commits. The others wait for the commit
record. A rank that fails leaves `…-failed.json` with the reason instead, so that nobody waits in vain; of rank 0 that is the
word that this try is given up. The same goes through the group as a note, for it may be the store that fails.
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

from ckpt import arrow, records
from ckpt.claim import Attempt, Claim
from ckpt.copies import Copies, Digests, agreed, compare, describe, lacking, require_equal, sharers
from ckpt.digest import digest
from ckpt.groups.base import Group, ranks_text
from ckpt.pack import lengths
from ckpt.records import CommitRecord
from ckpt.repository import Repository, step_folder
from ckpt.storage.base import Store
from ckpt.storage.errors import (
    CkptError,
    IntegrityError,
    NotFound,
    RanksMissing,
    SignatureError,
    StepRefused,
    StoreError,
    UnsupportedLeaf,
)
from ckpt.storage.failpoints import failpoint
from ckpt.storage.threads import Threads
from ckpt.tree import Flat, Node
from ckpt.trees import merge_trees, settle

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("ckpt")

TIMEOUT_SECONDS = 600.0
"""How long the committer waits for the last rank. The others wait twice as long for its answer."""

_POLL = (0.002, 0.5)  # seconds between looks: at first, and at most
_FENCE_SECONDS = 1.0  # between looks for a newer generation
T = TypeVar("T")

_READERS = 8  # parts read at once: a store far away answers each in its own time

_PART = re.compile(
    r"(?P<rank>\d+)-(?P<generation>\d+)-(?P<serial>\d+)-(?P<number>\d+)-(?:(?P<digest>[0-9a-f]{32}|[0-9a-f]{64})\.arrow|failed\.json)"
)


class Listed(NamedTuple):
    """A file of a part folder, by what its name says."""

    name: str
    rank: int
    digest: str | None
    """xxh3-128 of the file, or its HMAC where the rank has a key. None for the word of a rank that failed."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A step put together of all its parts."""

    table: pa.Table
    tree: Node
    packs: dict[str, int]
    """Lengths by name."""
    written_bytes: int
    algorithm: str
    parts: list[str]
    """The files it was made of, of no use after the commit."""


# --- what each rank leaves -------------------------------------------------------------------------------------


def part_metadata(
    tree: bytes, flat: Flat, packs: Mapping[str, int], written_bytes: int, claim: Claim, digests: Digests
) -> dict[str, str]:
    """What a part carries beside its rows."""
    return {
        "tree": tree.decode(),
        "held": describe(flat),
        "sharers": sharers(flat),
        "packs": json.dumps(dict(packs)),
        "written_bytes": str(written_bytes),
        "world_size": str(claim.size),
        **digests.metadata(flat),
    }


def publish(repo: Repository, attempt: Attempt, table: bytes) -> None:
    """Leave a part, once the packs that it names are durable."""
    failpoint("ranks.part")
    stem = _stem(attempt)
    signature = repo.keys.sign("part", _signed_part(stem, table))
    named = digest("xxh3-128", table).hex() if signature is None else signature.hmac_sha256
    repo.store.put(f"{stem}-{named}.arrow", table)


def _signed_part(stem: str, table: bytes) -> bytes:
    """What the code in the name of a part covers: its rank, try and step too, so that it can't be taken for another part."""
    return b"\n".join((stem.encode(), table))


def publish_failure(store: Store, claim: Claim, group: Group, attempt: Attempt, error: BaseException) -> None:
    """Report that this rank will not bring its part: to the group first, for the store may take long to fail."""
    reason = str(error) or type(error).__name__
    unreachable = isinstance(error, (StoreError, OSError))
    if unreachable and store.url not in reason:
        reason = f"{store.url}: {reason}"
    # Of another rank the committer says it. Other errors of ours are what rank 0 found out about all ranks.
    if attempt.rank == 0 and (unreachable or isinstance(error, UnsupportedLeaf) or not isinstance(error, CkptError)):
        reason = _given_up(attempt, 0, reason)
    said = {"reason": reason, "missing": isinstance(error, RanksMissing), "rank": attempt.rank}
    data = records.encode("failure", said)
    group.leave_note(_note_key(claim, attempt, attempt.rank == 0), data)
    store.put(f"{_stem(attempt)}-failed.json", data)


def note_unknown_end(store: Store, claim: Claim, group: Group, attempt: Attempt, error: BaseException) -> None:
    """Of rank 0: report that the store failed while the step was committed, so that the other ranks look once more and end."""
    reason = (
        f"rank 0 failed while it committed step {attempt.step} of {store.url}, and can't find out whether the step is there: "
        f"{error}"
    )
    said = {"reason": reason, "missing": False, "rank": 0}
    group.leave_note(_note_key(claim, attempt, True), records.encode("failure", said))


def note_end(claim: Claim, group: Group) -> None:
    """Report that this rank has ended its saves, where the store can't be reached: nobody need wait for more of it."""
    if group.size > 1:
        group.leave_note(_end_key(claim, claim.rank == 0), str(claim.rank).encode())


def _note_key(claim: Claim, attempt: Attempt, of_rank_0: bool) -> str:
    """The key of a note about an attempt: from rank 0 to all, or from another rank to rank 0."""
    return f"{claim.token}/{claim.lane}/{attempt.step}/{attempt.number}/{'given-up' if of_rank_0 else 'failed'}"


def _end_key(claim: Claim, of_rank_0: bool) -> str:
    return f"{claim.token}/{claim.lane}/ended{'-0' if of_rank_0 else ''}"


def _noted_failure(claim: Claim, group: Group, attempt: Attempt) -> StepRefused | None:
    """What a note says of this attempt: on rank 0 that another rank failed, elsewhere that rank 0 gave it up."""
    data = group.note(_note_key(claim, attempt, claim.rank != 0))
    if data is None:
        return None
    try:
        said = records.decode("failure", data, "a note of another rank")
        reason, missing, rank = str(said["reason"]), bool(said["missing"]), int(said["rank"])
    except (CkptError, KeyError, TypeError, ValueError) as error:
        log.debug("a note is passed over: %s", error)
        return None
    if claim.rank == 0:
        return StepRefused(_given_up(attempt, rank, reason))
    return _refusal(reason, missing)


def _given_up(attempt: Attempt, rank: int, reason: object) -> str:
    return f"step {attempt.step} is given up because rank {rank} failed: {reason}"


def _folder(step: int) -> str:
    return f"{step_folder(step)}/part"


def _stem(attempt: Attempt) -> str:
    return f"{_folder(attempt.step)}/{attempt.name}-{attempt.number}"


def _listed(store: Store, attempt: Attempt) -> Iterator[Listed]:
    """What has come for this try of the step."""
    for entry in store.list(_folder(attempt.step)):
        found = _PART.fullmatch(entry.name.rpartition("/")[2])
        if found and (int(found["generation"]), int(found["number"])) == (attempt.generation, attempt.number):
            yield Listed(entry.name, int(found["rank"]), found["digest"])


def _elsewhere(store: Store, attempt: Attempt, ranks: Collection[int]) -> str:
    """Of which other step the first of these ranks has brought a part that nobody committed, in words; "" if of none."""
    newest: dict[int, tuple[int, int]] = {}
    with suppress(CkptError):  # what is to be told is that they are missing
        names = {entry.name for entry in store.list("steps")}
        for name in names:
            folder, _, file = name.partition("/part/")
            part = _PART.fullmatch(file)
            if part is None or int(part["generation"]) != attempt.generation or f"{folder}/commit.json" in names:
                continue
            rank, step = int(part["rank"]), int(folder.removeprefix("steps/"))
            if rank in ranks and step != attempt.step:
                newest[rank] = max(newest.get(rank, (-1, -1)), (int(part["serial"]), step))
    return f" (rank {min(newest)} has come with step {newest[min(newest)][1]})" if newest else ""


def _failure(store: Store, name: str) -> StepRefused:
    """What a rank has left instead of its part."""
    try:
        said = records.load(store, "failure", name)
        return _refusal(str(said["reason"]), bool(said.get("missing")))
    except (NotFound, IntegrityError, KeyError) as error:
        return StepRefused(str(error))


def _refusal(reason: str, missing: bool) -> StepRefused:
    if not missing:
        return StepRefused(reason)
    error = RanksMissing(reason)
    error.given_up = True
    return error


# --- the committer ---------------------------------------------------------------------------------------------


def gather(repo: Repository, claim: Claim, group: Group, attempt: Attempt, timeout: float) -> list[Listed]:
    """Wait for the parts of all ranks; return them by rank.

    Raises StepRefused where a rank says that it failed, RanksMissing after `timeout` seconds, or where a rank has ended its
    saves, Fenced where a newer generation has begun.
    """
    found: dict[int, Listed] = {}

    def all_there() -> list[Listed] | None:
        for part in _listed(repo.store, attempt):
            if part.digest is None and part.rank != claim.rank:
                reason = _failure(repo.store, part.name)
                raise StepRefused(_given_up(attempt, part.rank, reason))
            found[part.rank] = part
        return [found[rank] for rank in sorted(found)] if len(found) == claim.size else None

    def never(missing: Sequence[int], why: str) -> RanksMissing:
        one, instead = len(missing) == 1, _elsewhere(repo.store, attempt, missing)
        return RanksMissing(
            f"{ranks_text(missing)} of {claim.size} did not bring {'its' if one else 'their'} part of step {attempt.step} "
            f"{why}; every rank of the group must save the same steps{instead}. Look at the log of "
            f"{'that rank' if one else 'those ranks'}; to save from one rank alone pass group=None"
        )

    def given_up() -> StepRefused | None:
        if (noted := _noted_failure(claim, group, attempt)) is not None:
            return noted
        left = claim.left() | _ended_rank(claim, group)  # what these had brought is there by now
        if left and all_there() is None and (missing := sorted(left - found.keys())):
            return never(missing, f"and {'has' if len(missing) == 1 else 'have'} ended")
        return None

    failpoint("ranks.gather")
    parts = _wait(all_there, claim, timeout, given_up)
    if parts is None:
        raise never([rank for rank in range(claim.size) if rank not in found], f"within {timeout:g} s")
    return parts


def _ended_rank(claim: Claim, group: Group) -> set[int]:
    """A rank that has ended its saves, by a note: on rank 0 one of the others, elsewhere rank 0."""
    text = group.note(_end_key(claim, claim.rank != 0)) or b""
    return {int(text)} if text.isdigit() else set()


def put_together(repo: Repository, step: int, listed: Sequence[Listed]) -> Whole:
    """Read, verify and merge the parts; raise StepRefused where they do not make a whole step."""
    with _refusing(step):
        return _put_together(repo, listed)


@contextmanager
def _refusing(step: int) -> Iterator[None]:
    """Say of which step something is refused."""
    try:
        yield
    except StepRefused as error:
        raise StepRefused(f"step {step}: {error}") from None


def _put_together(repo: Repository, listed: Sequence[Listed]) -> Whole:
    from ckpt.merge import merge

    failpoint("ranks.merge")
    tables = _read_all(repo, listed)
    told: dict[str, tuple[list[int], Node]] = {}
    packs: dict[str, int] = {}
    written = 0
    algorithms: dict[str, int] = {}
    sizes: dict[str, int] = {}
    held: dict[str, int] = {}
    sharing: dict[str, list[int]] = {}
    verify: dict[str, list[int]] = {}
    copies: list[tuple[int, Copies]] = []
    samples: dict[tuple[str, str], list[int]] = {}
    for part, table in zip(listed, tables, strict=True):
        said = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        if said["tree"] in told:
            told[said["tree"]][0].append(part.rank)
        else:
            told[said["tree"]] = ([part.rank], json.loads(said["tree"])["tree"])
        packs.update(json.loads(said["packs"]))
        written += int(said["written_bytes"])
        algorithms.setdefault(said["digest"], part.rank)
        sizes.setdefault(said["world_size"], part.rank)
        held.setdefault(said["held"], part.rank)
        sharing.setdefault(said["sharers"], []).append(part.rank)
        verify.setdefault(said.get("verify", "false"), []).append(part.rank)
        copies.append((part.rank, json.loads(said.get("copies", "[]"))))
        samples.setdefault((said["held"], said.get("samples", "")), []).append(part.rank)
    ranks = [part.rank for part in listed]
    _require_one("digests by", algorithms)
    _require_one("counts its group as", sizes)
    _require_all_verify(verify)
    known = agreed(held)
    compare(copies)
    if cause := lacking(sharing, lambda names: _storing(names, ranks, tables)):  # first, for a gap may be of any leaf
        raise StepRefused(cause)
    require_equal(samples)
    table = merge([(rank, table.replace_schema_metadata(None)) for rank, table in zip(ranks, tables, strict=True)], known)
    tree = settle(merge_trees(list(told.values())), _leaf_names(table))
    return Whole(table, tree, packs, written, next(iter(algorithms)), [part.name for part in listed])


def _read_all(repo: Repository, listed: Sequence[Listed]) -> list[Any]:
    """The tables of the parts, read by several threads."""
    with Threads(min(_READERS, len(listed) or 1), "ckpt-parts") as pool:
        return list(pool.map(lambda part: _read(repo, part), listed))


def _read(repo: Repository, part: Listed) -> Any:
    from ckpt.table import read_part

    where = f"{repo.url}/{part.name}"
    data = repo.store.get_up_to(part.name, records.PART_BYTES)
    stem, _, code = part.name.removesuffix(".arrow").rpartition("-")
    is_signed = len(code) == 64
    if is_signed and not repo.keys:
        raise StepRefused(f"rank {part.rank} signs with a key, and rank 0 has none; give all ranks the same key")
    if not is_signed and repo.keys:
        raise SignatureError(f"{where} has no signature: rank {part.rank} has no key; give all ranks the same key")
    signer = next((key for key in repo.keys if hmac.compare_digest(key.code("part", _signed_part(stem, data)), code)), None)
    if is_signed and signer is None:
        raise SignatureError(
            f"{where} is not signed with a key of rank 0: rank {part.rank} has another key, or the file was changed; give all "
            "ranks the same key, and save the step again"
        )
    if not is_signed and digest("xxh3-128", data).hex() != code:
        raise IntegrityError(f"{where} is damaged: its digest is not that of its name; save the step again")
    return read_part(data, where)


def _require_one(what: str, told: dict[str, int]) -> None:
    if len(told) > 1:
        (a, first), (b, second) = list(told.items())[:2]
        raise StepRefused(f"rank {first} {what} {a}, rank {second} {b}; every rank must save with the same options")


def _require_all_verify(verify: Mapping[str, Sequence[int]]) -> None:
    """Copies are compared where every rank has digested its own in the same way."""
    if len(verify) > 1:
        options = sorted(verify.items(), reverse=True)
        chosen = ", ".join(f"{json.loads(option)} on {ranks_text(ranks)}" for option, ranks in options)
        raise StepRefused(f"verify_replicas={chosen}; every rank must save with the same options")


def _storing(names: Collection[str], ranks: Sequence[int], tables: Sequence[pa.Table]) -> dict[str, set[int]]:
    """The ranks that have stored something of these leaves."""
    found: dict[str, set[int]] = {}
    for rank, table in zip(ranks, tables, strict=True):
        for name in _leaf_names(table) & set(names):
            found.setdefault(name, set()).add(rank)
    return found


def _leaf_names(table: pa.Table) -> set[str]:
    return set(arrow.call("unique", table["leaf"]).to_pylist())


def totals(table: pa.Table) -> tuple[int, int]:
    """The number of leaves of a merged table, and their bytes."""
    return len(_leaf_names(table)), int(np.sum(arrow.array_of(table["nbytes"])))


def require_whole(data: bytes, tree: Node, step: int, where: str) -> int:
    """The bytes of the leaves of a single process; raise StepRefused where its shards do not make whole leaves."""
    from ckpt.manifest import read_table
    from ckpt.merge import merge

    with _refusing(step):
        table = merge([(0, read_table(data, where))])
        settle(tree, _leaf_names(table))
    return totals(table)[1]


def require_packs(store: Store, step: int, packs: Mapping[str, int]) -> None:
    """Raise StepRefused where a pack that the step would name is not there whole."""
    there = lengths(store, packs)
    for name, nbytes in packs.items():
        if there.get(name) != nbytes:
            raise StepRefused(f"step {step} refers to {store.url}/{name}, which is missing or cut; save the step again")


# --- the others ------------------------------------------------------------------------------------------------


def await_commit(repo: Repository, claim: Claim, group: Group, attempt: Attempt, timeout: float) -> CommitRecord:
    """Wait until rank 0 has committed this try of the step, and return the record.

    Raises StepRefused with the reason where rank 0 gave it up, RanksMissing where it says nothing for `timeout` seconds.
    """

    def answer() -> CommitRecord | None:
        said = list(_listed(repo.store, attempt))  # before the record: rank 0 gives up only what it has not committed
        try:
            commit = repo.record(attempt.step)
            if (commit.generation, commit.attempt) == (attempt.generation, attempt.number):
                return commit
        except (NotFound, IntegrityError):
            pass
        for part in said:
            if part.rank == 0 and part.digest is None:
                raise _failure(repo.store, part.name)
        return None

    def given_up() -> StepRefused | None:
        if (noted := _noted_failure(claim, group, attempt)) is not None:
            return noted
        if _ended_rank(claim, group):
            return RanksMissing(f"rank 0 of {claim.size} has ended its saves: no step can be committed any more")
        return claim.lost()

    commit = _wait(answer, claim, timeout, given_up)
    if commit is None:
        raise RanksMissing(
            f"rank 0 of {claim.size} has not committed step {attempt.step} within {timeout:g} s; look at its log. Every rank "
            f"of the group must save the same steps{_elsewhere(repo.store, attempt, [0])}; to save from one rank alone pass "
            "group=None"
        )
    return commit


def _wait(look: Callable[[], T | None], claim: Claim, timeout: float, given_up: Callable[[], StepRefused | None]) -> T | None:
    """What `look` finds, asked more and more slowly; None when the time is up.

    Raises Fenced where a newer generation has begun, StoreError where the repository is gone, and what `given_up` says; but
    looks once more before.
    """
    deadline = time.monotonic() + timeout
    pause = _POLL[0]
    fence = time.monotonic() + _FENCE_SECONDS
    while True:
        if (found := look()) is not None:
            return found
        claim.moves += 1
        now = time.monotonic()
        if now >= deadline:
            return None
        if now >= fence:
            fence = now + _FENCE_SECONDS
            hopeless = claim.over() or given_up()
            if hopeless is not None:
                if (found := look()) is not None:
                    return found
                raise hopeless
        time.sleep(min(pause, max(0.0, deadline - now)))
        pause = min(pause * 1.5, _POLL[1])
