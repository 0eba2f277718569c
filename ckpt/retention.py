"""Which steps to keep, and the deletion of everything that no committed step needs.

Order of a deletion, and what a crash between two steps leaves: the commit record (the step no longer exists) → the
manifests (nobody can commit on them any more) → the packs that no other step refers to. What is left over is
unreachable and goes with the next sweep.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.arguments import whole
from ckpt.claim import Claim, old_generations
from ckpt.complete import is_complete
from ckpt.lines import in_order
from ckpt.records import RECORD_BYTES, CommitRecord, decode_commit
from ckpt.repository import Repository, commit_name
from ckpt.storage.conditional import RESERVATION_BYTES
from ckpt.storage.errors import CkptError, IntegrityError, InvalidArgument, NotFound, SignatureError
from ckpt.storage.failpoints import failpoint

log = logging.getLogger("ckpt")

_OURS = re.compile(r"steps/\d+/(?:pack|manifest|part)/(?P<attempt>(?P<rank>\d+)-(?P<generation>\d+)-\d+)[-.][\w.-]+")


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the newest `last` good steps, and for ever every step that `every` divides.

    After a roll-back what was saved later is newer, whatever its number: the steps that were abandoned are deleted first, as
    soon as there are `last` good ones without them. Steps of another run that were set aside are never deleted.

    copies: of blocks that do not change, on the disk. A step then refers to no block that one of the `copies - 1` steps before
        it refers to, so that a block that rots takes one of `copies` steps, and not all of them.
    """

    last: int
    every: int | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        numbers = (self.last,) if self.every is None else (self.last, self.every)
        if any((whole(number) or 0) < 1 for number in numbers):
            raise InvalidArgument(f"{self}: at least the last step must be kept, and `every` is a positive number of steps")
        if not 1 <= (whole(self.copies) or 0) <= self.last:
            raise InvalidArgument(f"{self}: `copies` is a number from 1 up to `last`: each copy belongs to a step that is kept")


def as_keep(keep: int | Keep | None) -> Keep | None:
    """`keep=3` means the last three."""
    if keep is None or isinstance(keep, Keep):
        return keep
    if (number := whole(keep)) is None:
        raise InvalidArgument(f"keep={keep!r}: use a number of steps, or ckpt.Keep")
    return Keep(number)


def expired(steps: Iterable[int], good: Iterable[int], keep: Keep, order: Sequence[int] | None = None) -> list[int]:
    """The steps to delete, the oldest first. Pure. Only good steps count as kept, and none newer than the oldest kept goes;
    where fewer are good than shall be kept, none goes at all.

    order: the steps from the oldest to the newest, where that is not the order of their numbers: abandoned ones come first.
    """
    age: Callable[[int], int] = _number if order is None else {step: at for at, step in enumerate(order)}.__getitem__
    kept = sorted(good, key=age)[-keep.last :]
    if len(kept) < keep.last:
        return []
    return [s for s in sorted(steps, key=age) if age(s) < age(kept[0]) and not (keep.every and s % keep.every == 0)]


def _number(step: int) -> int:
    return step


def sweep(
    repo: Repository,
    claim: Claim,
    keep: Keep | None = None,
    spare: Collection[int] = (),
    distrusted: Collection[int] = (),
    protected: Collection[str] = (),
    retired: Collection[str] = (),
) -> None:
    """Delete expired steps, and what attempts that never committed have left. Only for the holder of the claim.

    spare: steps that stay in any case, such as the one just saved.
    distrusted: steps that were found damaged; they count as no good ones.
    protected: packs that another rank may refer to.
    retired: files of records that were replaced. What other ranks of this generation write is deleted only if it is
        retired or the step that named it goes: whether they still write it cannot be seen from here.
    """
    claim.check()
    store = repo.store
    active = claim.active()  # before the listing: what commits after it was active then
    sizes = {entry.name: entry.nbytes for entry in store.list("steps")}
    commits: dict[int, CommitRecord] = {}
    damaged: set[int] = set()
    unreadable: set[int] = set()
    reserved: set[int] = set()  # of publications that were given up
    unsigned: set[int] = set()
    for step in repo.step_numbers():
        if commit_name(step) in sizes:
            try:
                data = store.get_up_to(commit_name(step), RECORD_BYTES)
                commits[step] = decode_commit(data, f"{repo.url}/{commit_name(step)}")
                if repo.keys:
                    repo.decode(step, data)
            except NotFound as error:
                if sizes[commit_name(step)] <= RESERVATION_BYTES:
                    reserved.add(step)
                else:  # it was listed a moment ago, and nobody else deletes here
                    log.warning("nothing that step %d may need is deleted: %s", step, error)
                    unreadable.add(step)
            except SignatureError:  # no step for those with the key; what it refers to stays as long as it
                unsigned.add(step)
            except IntegrityError:
                damaged.add(step)
            except CkptError as error:
                log.warning("nothing that step %d may need is deleted: %s", step, error)
                unreadable.add(step)
    if keep is not None:
        order = in_order(
            {step: commit.on for step, commit in commits.items() if step not in unsigned},
            damaged | unreadable | reserved | unsigned,
        )
        # A damaged record does not say its line: where steps are set aside, it may be one of them.
        may_go = (commits.keys() | reserved | (set() if order.aside else damaged)) - set(spare) - order.aside
        doubtful = {*order.aside, *distrusted, *unsigned}
        good = [
            s for s in order.steps
            if s in commits and s not in doubtful and is_good(commits[s], sizes)
        ]  # fmt: skip
        if expired(may_go, good, keep, order.steps):  # then those that stay must be complete
            good = _newest_complete(repo, [commits[s] for s in reversed(good)], keep.last)
        for step in expired(may_go, good, keep, order.steps):
            failpoint("delete.commit")
            store.delete([commit_name(step)])
            if (gone := commits.pop(step, None)) is not None:
                retired = {*retired, *gone.files()}
            damaged.discard(step)
    damaged |= unreadable
    needed = {commit_name(step) for step in commits}.union(protected, *active.values())
    for commit in commits.values():
        needed.update(commit.files())
    doomed = [name for name in sizes if name not in needed and _is_left_over(name, claim, active, damaged, retired)]
    if damaged:  # a record that can't be read may refer to any pack
        doomed = [name for name in doomed if "/pack/" not in name]
    doomed = _never_committed(repo, claim, doomed)
    if doomed:
        claim.check()  # the listing and the records took a while
    failpoint("delete.files")
    store.delete(sorted(name for name in doomed if "/pack/" not in name))
    failpoint("delete.packs")
    store.delete(sorted(name for name in doomed if "/pack/" in name))
    store.delete(old_generations(repo))


def _never_committed(repo: Repository, claim: Claim, doomed: list[str]) -> list[str]:
    """Of these left-overs those that nobody can commit any more. A writer that was succeeded may stand still right before it
    puts the record of an attempt: that put must fail before a file of the attempt goes."""
    older: dict[int, list[str]] = {}
    for name in doomed:
        if (found := _OURS.fullmatch(name)) is not None and int(found["generation"]) < claim.generation:
            older.setdefault(int(name.split("/")[1]), []).append(name)
    spared: set[str] = set()
    unread = False
    for step, names in older.items():
        try:
            revoked = repo.store.revoke(commit_name(step))
            record = repo.record(step)
        except NotFound:
            continue
        except CkptError as error:
            log.warning("nothing that step %d may need is deleted: %s", step, error)
            spared.update(names)
            unread = True
            continue
        spared.update(record.files())
        if not revoked and record.generation < claim.generation:  # it may be replaced by the older writer yet
            spared.update(names)
    return [name for name in doomed if name not in spared and not (unread and "/pack/" in name)]


def is_good(commit: CommitRecord, sizes: Mapping[str, int]) -> bool:
    """Whether every file of a step is there with its length."""
    return all(sizes.get(f.name) == f.nbytes for f in (*commit.manifests, *commit.trees, *commit.packs))


def _newest_complete(repo: Repository, newest_first: Iterable[CommitRecord], count: int) -> list[int]:
    """The newest `count` of these steps whose trees fit to their manifests; fewer where there are no more."""
    return [commit.step for commit in itertools.islice((c for c in newest_first if is_complete(repo.store, c)), count)]


def _is_left_over(name: str, claim: Claim, active: Collection[str], damaged: Collection[int], retired: Collection[str]) -> bool:
    ours = _OURS.fullmatch(name)
    if ours is None or int(ours["generation"]) > claim.generation or ours["attempt"] in active:
        return False
    if name.endswith("-failed.json") and int(ours["generation"]) == claim.generation:
        return False  # a slow rank may not have read it yet; the next generation takes it
    if int(ours["generation"]) == claim.generation and int(ours["rank"]) != claim.rank and name not in retired:
        return False
    return int(name.split("/")[1]) not in damaged
