"""The rule by which steps are kept (Keep), and the sweep that deletes the files that no committed step needs.

A sweep deletes in this order, so that a crash at any point leaves only unreachable files, which the next sweep deletes: first
the commit record (the step no longer exists), then the manifests (no writer can commit them any more), then the packs to which
no other step refers.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from ckpt.errors import SignatureError
from ckpt.format.json_records import MAX_RECORD_BYTES, CommitRecord, decode_commit
from ckpt.format.pack import step_of_file
from ckpt.format.training_lines import TrainingLine, order_steps
from ckpt.repository.completeness import is_complete
from ckpt.repository.file_names import STEPS_FOLDER, commit_name
from ckpt.repository.lease_records import obsolete_lease_records
from ckpt.repository.permanent_steps import Windows
from ckpt.repository.repository import Repository, steps_text
from ckpt.repository.writer_lease import WriterLease
from ckpt.storage.base.conditional_store import RESERVATION_BYTES
from ckpt.storage.base.errors import CkptError, IntegrityError, InvalidArgument, NotFound, is_damage
from ckpt.storage.base.failpoints import failpoint
from ckpt.support.validation import as_integer

log = logging.getLogger("ckpt")

_STEP_FOLDER = re.compile(r"steps/(\d+)/.+")
_ATTEMPT_FILE = re.compile(r"steps/\d+/(?:pack|manifest|part)/(?P<attempt>(?P<rank>\d+)-(?P<generation>\d+)-\d+)[-.][\w.-]+")


@dataclass(frozen=True, slots=True)
class Keep:
    """Which steps to keep; a save deletes the others after its commit.

        ckpt.Checkpointer(url, every=100, keep=ckpt.Keep(last=3, every=1000))

    last: how many of the newest complete steps to keep. A step that is known to be damaged does not count.
    every: of each so many step numbers, keep permanently the first step that was saved. Keep(…, every=1000) keeps the first
        step from 0 on, the first one from 1000 on, and so on, at whatever numbers or times the steps are saved. If steps are
        counted from 0, the 1000th one has the number 999, so this step counts as the first one from 1000 on, unless step 1000
        is saved next. A Checkpointer with every=100 saves 99, 199, …, of which 99, 999, 1999, … are kept. If the first step is
        damaged, the next one that still exists is kept, too. None keeps no steps permanently.
    copies: how many copies of an unchanged block to keep. Each step shares blocks only with the step that is `copies` saves
        before it, so that a damaged block affects only one in `copies` steps.

    What was saved last is the newest, whatever its number. After a roll-back, abandoned steps count as older than all others.
    They are deleted once `last` complete steps exist that are not abandoned, except those that `every` keeps: a permanent step
    stays so after a roll-back, and the steps after the roll-back count for themselves. Steps of another run that were set aside
    are never deleted.

    Raises:
        InvalidArgument: A number is not positive, or `copies` is larger than `last`.
    """

    last: int
    every: int | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        numbers = (self.last,) if self.every is None else (self.last, self.every)
        if any((as_integer(number) or 0) < 1 for number in numbers):
            raise InvalidArgument(
                f"{self}: at least the last step must be kept, and `every` must be a positive number of steps"
            )
        if not 1 <= (as_integer(self.copies) or 0) <= self.last:
            raise InvalidArgument(f"{self}: `copies` must be from 1 to `last`: each copy belongs to a step that is kept")


def as_keep(keep: int | Keep | None) -> Keep | None:
    """Return the `Keep` that the argument keep= means; a number is `Keep(last=number)`. Raises InvalidArgument."""
    if keep is None or isinstance(keep, Keep):
        return keep
    if (number := as_integer(keep)) is None:
        raise InvalidArgument(f"keep={keep!r}: use a number of steps, or ckpt.Keep")
    return Keep(number)


def expired_steps(
    steps: Iterable[int],
    complete: Iterable[int],
    keep: Keep,
    order: Sequence[int] | None = None,
    is_permanent: Callable[[int], bool] | None = None,
) -> list[int]:
    """Return the steps to delete, the oldest first. This is a pure function.

    steps: those that may be deleted. complete: those that count for `keep.last`.

    No step newer than the oldest of the last complete steps is deleted. With fewer complete steps than `keep.last`, no step is
    deleted.

    order: all steps from the oldest to the newest, if that is not the order of their numbers; abandoned steps come first.
    is_permanent: whether `keep.every` keeps a step. None: all steps are on one line, and only those of
        `complete` are known to be complete.
    """
    age: Callable[[int], int] = _by_number if order is None else {step: at for at, step in enumerate(order)}.__getitem__
    steps, complete = set(steps), set(complete)
    kept_steps = sorted(complete, key=age)[-keep.last :]
    if len(kept_steps) < keep.last:
        return []
    if is_permanent is None:
        line = TrainingLine()
        is_permanent = _permanence(keep, dict.fromkeys(steps | complete, line), line, complete.__contains__)
    return [step for step in sorted(steps, key=age) if age(step) < age(kept_steps[0]) and not is_permanent(step)]


def _permanence(
    keep: Keep,
    lines: Mapping[int, TrainingLine],
    unknown_line: TrainingLine,
    is_known_complete: Callable[[int], bool],
    damaged: Collection[int] = (),
    reserved: Collection[int] = (),
) -> Callable[[int], bool]:
    """Return a function that returns whether `keep.every` keeps a step.

    reserved: numbers under which nothing was saved. The other arguments are those of `Windows`.
    """
    if keep.every is None:
        return lambda _: False
    windows = Windows(keep.every, lines, unknown_line, damaged)
    return lambda step: step not in reserved and windows.is_permanent(step, is_known_complete)


def _by_number(step: int) -> int:
    return step


def sweep(
    repo: Repository,
    lease: WriterLease,
    keep: Keep | None = None,
    spared_steps: Collection[int] = (),
    damaged_steps: Collection[int] = (),
    protected_packs: Collection[str] = (),
    replaced_files: Collection[str] = (),
) -> None:
    """Delete expired steps, and the files of attempts that never committed. Only the holder of the writer lease calls it.

    keep: which steps to keep; None deletes no step.
    spared_steps: steps that stay in any case, such as the one just saved.
    damaged_steps: steps that were found damaged; they do not count as complete.
    protected_packs: packs to which another rank may refer.
    replaced_files: files of records that were replaced. This rank can't see whether other ranks of this generation still write
        a file. Therefore a file of theirs is deleted only if it is listed here or the step that names it is deleted.

    Raises Fenced if a newer writer lease exists, and StoreError if the store failed.
    """
    lease.require_newest()
    store = repo.store
    # Read before the listing: an attempt that commits during the listing is among these, and one that begins later waits for
    # the end of the sweep before it writes. A step that is saved again may get a new record after its old one was read here.
    active, spared_steps = lease.active_attempts(), {*spared_steps, *lease.active_steps()}
    sizes = {entry.name: entry.nbytes for entry in store.list(STEPS_FOLDER)}
    records = _read_records(repo, sizes)
    released_files = {*replaced_files}
    if keep is not None:
        deleted = _delete_expired(repo, lease, records, sizes, keep, spared_steps, damaged_steps)
        released_files = {*released_files, *deleted}
    unusable = records.damaged | records.unreadable  # after the call above, which removes what it has deleted
    needed = set(protected_packs).union(*active.values())
    for commit in records.commits.values():
        needed.update(commit.files())
    to_delete = [name for name in sizes if name not in needed and _is_leftover(name, lease, active, unusable, released_files)]
    if unusable:  # an unreadable record may refer to any pack
        _warn_of_records(repo, unusable, records.errors)
        to_delete = [name for name in to_delete if "/pack/" not in name]
    to_delete = _only_uncommittable(repo, lease, to_delete)
    if to_delete:
        lease.require_newest()  # reading the listing and the records took time
    failpoint("delete.files")
    store.delete(sorted(name for name in to_delete if "/pack/" not in name))
    failpoint("delete.packs")
    store.delete(sorted(name for name in to_delete if "/pack/" in name))
    store.delete(obsolete_lease_records(repo))


@dataclass(frozen=True, slots=True)
class _Records:
    """The commit records of a repository, by step. The sets are of steps whose record can't be used."""

    commits: dict[int, CommitRecord] = field(default_factory=dict)
    """All that could be decoded, those in `unsigned` included."""
    damaged: set[int] = field(default_factory=set)
    unreadable: set[int] = field(default_factory=set)
    reserved: set[int] = field(default_factory=set)
    """Steps whose publication was abandoned."""
    unsigned: set[int] = field(default_factory=set)
    errors: dict[int, CkptError] = field(default_factory=dict)
    """Why the damaged and the unreadable ones can't be used."""


def _read_records(repo: Repository, sizes: Mapping[str, int]) -> _Records:
    """Return the commit records of all steps.

    sizes: the bytes of each file of the repository, by name. A record that is not among these is read too if no file of its
        step is, since a server may cut a listing short.
    """
    found = _Records()
    listed = {int(match[1]) for name in sizes if (match := _STEP_FOLDER.fullmatch(name))}
    for step in sorted(listed.union(repo.step_numbers())):
        is_listed = commit_name(step) in sizes
        if step in listed and not is_listed:
            continue
        try:
            data = repo.store.get_up_to(commit_name(step), MAX_RECORD_BYTES)
            found.commits[step] = decode_commit(data, f"{repo.url}/{commit_name(step)}", step=step)
            if repo.keys:
                repo.decode(step, data)
        except NotFound as error:
            if not is_listed:
                continue
            if sizes[commit_name(step)] <= RESERVATION_BYTES:  # stores list a reservation, and read it as a missing object
                found.reserved.add(step)
            else:  # it was just listed, and no other process deletes here
                found.unreadable.add(step)
                found.errors[step] = error
        except SignatureError:  # does not count as complete, but its files stay as long as its record does
            found.unsigned.add(step)
        except CkptError as error:  # a record on a bad sector does not expire: the device may read it again
            (found.damaged if isinstance(error, IntegrityError) else found.unreadable).add(step)
            found.errors[step] = error
    return found


def _warn_of_records(repo: Repository, unusable: Collection[int], errors: Mapping[int, CkptError]) -> None:
    """Log which records can't be used, so that nothing that these steps may need is deleted.

    A damaged record that is newer than the expired steps, and one on a bad sector, keep all packs until the user acts.
    """
    for step in sorted(unusable):
        if is_damage(errors[step]):
            log.warning(
                "no pack of %s is deleted, since step %d may need any: %s is damaged or on a bad sector; restore it from a "
                "copy, or delete it if nobody needs this step", repo.url, step, commit_name(step),
            )  # fmt: skip
        else:
            log.warning("nothing that step %d may need is deleted: %s", step, errors[step])


def _delete_expired(
    repo: Repository,
    lease: WriterLease,
    records: _Records,
    sizes: Mapping[str, int],
    keep: Keep,
    spared_steps: Collection[int],
    damaged_steps: Collection[int],
) -> set[str]:
    """Delete the commit records of expired steps, also from `records`. Returns the files that these records named."""
    commits, damaged, reserved, unsigned = records.commits, records.damaged, records.reserved, records.unsigned
    known = {step: commit.training_line for step, commit in commits.items() if step not in unsigned}
    unknown = damaged | records.unreadable | unsigned
    if unknown and repo.order_of(known, unknown).newest_line != order_steps(known).newest_line:
        log.warning(
            "no step of %s is deleted: %s, whose record can't be read, may be the newest after a roll-back", repo.url,
            steps_text(sorted(unknown)),
        )  # fmt: skip
        return set()
    order = order_steps(known, unknown | reserved)
    # The training line of a damaged or unsigned record is unknown. If steps are set aside, this may be one of them.
    of_unknown_line = set() if order.set_aside else damaged | unsigned
    deletable = ((commits.keys() - unsigned) | reserved | of_unknown_line) - set(spared_steps) - order.set_aside
    doubtful = {*order.set_aside, *damaged_steps, *unsigned}
    good = [s for s in order.steps if s in commits and s not in doubtful and has_all_files(commits[s], sizes)]
    candidates, known_damage = {*good}, {s for s in known if s in damaged_steps or not has_all_files(commits[s], sizes)}
    permanence = partial(_permanence, keep, known, order.newest_line, damaged=known_damage, reserved=reserved)
    expired = expired_steps(deletable, good, keep, order.steps, permanence(candidates.__contains__))
    if expired:  # before any is deleted, those that are kept instead must be complete
        good = _newest_complete(repo, [commits[s] for s in reversed(good)], keep.last)
        is_known_complete = cache(lambda step: step in candidates and is_complete(repo.store, commits[step]))
        expired = expired_steps(deletable, good, keep, order.steps, permanence(is_known_complete))
    deleted_files: set[str] = set()
    for step in expired:
        lease.require_newest()  # a newer writer may have saved a step of this number, and no store has a conditional delete
        failpoint("delete.commit")
        repo.store.delete([commit_name(step)])
        if (deleted := commits.pop(step, None)) is not None:
            deleted_files.update(deleted.files())
        damaged.discard(step)
    return deleted_files


def _only_uncommittable(repo: Repository, lease: WriterLease, leftovers: list[str]) -> list[str]:
    """Return those of the leftover files that no writer can commit any more.

    A fenced writer may be paused right before it writes the commit record of an attempt. A request of this writer to write one
    may have got no answer. Such a write must be made to fail before a file that the record names is deleted.
    """
    names_by_step: dict[int, set[str]] = {}
    for name in leftovers:
        if (found := _ATTEMPT_FILE.fullmatch(name)) is not None and int(found["generation"]) < lease.generation:
            names_by_step.setdefault(step_of_file(name), set()).add(name)
    unsettled_steps: set[int] = set()
    for commit in lease.unsettled_commits().values():
        if names := {*leftovers}.intersection(commit.files()):  # also packs of other steps
            names_by_step.setdefault(commit.step, set()).update(names)
            unsettled_steps.add(commit.step)
    spared: set[str] = set()
    has_unread_record = False
    for step, names in names_by_step.items():
        try:
            # False: a record exists, and a prepared write that replaces it may still succeed.
            revoked = repo.store.revoke(commit_name(step))
            record = repo.record(step)
        except NotFound:
            continue
        except CkptError as error:
            log.warning("nothing that step %d may need is deleted: %s", step, error)
            spared.update(names)
            has_unread_record = True
            continue
        spared.update(record.files())
        if not revoked and (record.generation < lease.generation or step in unsettled_steps):
            spared.update(names)  # the record that replaces this one may name them
    return [name for name in leftovers if name not in spared and not (has_unread_record and "/pack/" in name)]


def has_all_files(commit: CommitRecord, sizes: Mapping[str, int]) -> bool:
    """Return whether every file of a step exists with its recorded length.

    sizes: the bytes of each file of the repository, by name.
    """
    return all(sizes.get(f.name) == f.nbytes for f in (*commit.manifests, *commit.trees, *commit.packs))


def _newest_complete(repo: Repository, newest_first: Iterable[CommitRecord], count: int) -> list[int]:
    """Return the first `count` complete steps, or fewer if there are no more. The trees of these match their manifests."""
    return [commit.step for commit in itertools.islice((c for c in newest_first if is_complete(repo.store, c)), count)]


def _is_leftover(
    name: str, lease: WriterLease, active: Collection[str], unusable: Collection[int], released_files: Collection[str]
) -> bool:
    """Return whether a file that no step needs may be deleted. unusable: steps whose record may name it."""
    attempt_file = _ATTEMPT_FILE.fullmatch(name)
    if attempt_file is None or int(attempt_file["generation"]) > lease.generation or attempt_file["attempt"] in active:
        return False
    if name.endswith("-failed.json") and int(attempt_file["generation"]) == lease.generation:
        return False  # a slow rank may not have read it yet; a sweep of the next generation deletes it
    if (
        int(attempt_file["generation"]) == lease.generation
        and int(attempt_file["rank"]) != 0  # rank 0 sweeps, and can't see whether another rank still writes
        and name not in released_files
    ):
        return False
    return step_of_file(name) not in unusable
