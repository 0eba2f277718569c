"""save, load, open: the whole of the library for most users."""

from __future__ import annotations

import logging
import operator
import os
import warnings
from collections.abc import Callable, Container
from typing import Any, Literal, TypeVar, overload

from ckpt import session as sessions
from ckpt.checkpoint import Checkpoint
from ckpt.codec import CodecWish
from ckpt.fill import Filler
from ckpt.handle import SaveHandle
from ckpt.quiet import collector_paused
from ckpt.read import Progress
from ckpt.repository import Repository, commit_name, open_repository
from ckpt.retention import Keep, as_keep
from ckpt.select import Patterns, entries, matcher, require_match, select
from ckpt.storage.base import Store
from ckpt.storage.errors import CkptError, IntegrityError, StepNotFound
from ckpt.write import Options, take_apart
from ckpt.write import save as run_save

log = logging.getLogger("ckpt")

Url = str | os.PathLike[str] | Store


@overload
def save(
    state: Any, url: Url, step: int | None = None, *, blocking: Literal[True] = True, codec: CodecWish = "auto",
    digest: str = "xxh3-128", keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False,
) -> Checkpoint: ...  # fmt: skip
@overload
def save(
    state: Any, url: Url, step: int | None = None, *, blocking: Literal[False], codec: CodecWish = "auto",
    digest: str = "xxh3-128", keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False,
) -> SaveHandle: ...  # fmt: skip
def save(
    state: Any, url: Url, step: int | None = None, *, blocking: bool = True, codec: CodecWish = "auto",
    digest: str = "xxh3-128", keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False,
) -> Checkpoint | SaveHandle:  # fmt: skip
    """Save `state` as one step of the repository at `url`, which is made if it is not there.

    state: any nesting of dict, list, tuple, namedtuple and dataclass over numpy, torch and jax arrays, plain values,
        and objects with state_dict() and load_state_dict().
    step: its number; None takes the one after the newest.
    blocking: True returns the checkpoint when it is durable and committed. False returns a handle as soon as the state
        is copied and may change; `handle.result()` waits, and an error that nobody asked for is raised by the next
        save to the same URL.
    codec: "auto", "none", a numcodecs codec or configuration, or {name pattern: one of those}.
    digest: "xxh3-128", or "blake3" where somebody might forge blocks.
    keep: delete all but the newest so many steps (or see `ckpt.Keep`) after the commit.
    memory: staging memory in bytes. A state larger than that is staged in pieces, as fast as it can be written.
    overwrite: replace the step if it is there.

    Raises UnsupportedLeaf, RepositoryBusy, AlreadyExists, StoreError, Fenced; nothing is changed then.
    """
    options = Options(codec, digest, memory, as_keep(keep), overwrite)
    number = None if step is None else check_step(step)
    repo = open_repository(url)
    flat = take_apart(state)
    session = sessions.enter(repo)
    try:
        session.raise_failed()
        if number is None:
            number = next_step(session.repo)
        handle = run_save(session, flat, number, options, blocking)
    except BaseException:
        sessions.leave(session)
        raise
    if blocking:
        sessions.leave(session)
        return handle.result()
    handle.when_done(lambda: sessions.leave(session))
    return handle


def load(
    url: Url, like: Any = None, *, step: int | None = None, only: Patterns | None = None, strict: bool = False,
    progress: Progress | None = None,
) -> Any:  # fmt: skip
    """Load a step, by default the newest that is whole, and return the state.

    like: a state whose arrays are filled in place; it may be a part of what was saved. Without it new arrays are made,
        on the host, of the kinds that were saved.
    step: a number. The newest otherwise; where its files turn out damaged the one before is taken, with a warning.
    only: names or shell patterns of the leaves to load, such as "model.*"; the others stay as they are in `like`, and
        are left out without it (in a list or tuple: None).
    strict: raise instead of falling back to an older step.
    progress: called with the number of bytes just read, from several threads.

    Raises StepNotFound, LeafNotFound and LeafMismatch before anything is changed, and IntegrityError, after which the
    arrays of `like` may hold a mixture.
    """
    repo = open_repository(url)
    if step is not None:
        return load_checkpoint(repo[check_step(step)], like, only, progress)
    found = load_newest(repo, strict, lambda checkpoint: load_checkpoint(checkpoint, like, only, progress))
    if found is None:
        raise StepNotFound(f"{repo.url} has no committed step to load")
    return found[1]


Loaded = TypeVar("Loaded")


def load_newest(repo: Repository, strict: bool, read: Callable[[Checkpoint], Loaded]) -> tuple[int, Loaded] | None:
    """The newest step that `read` finds whole, and what that returned; None where no step is committed.

    Says with a warning and in the log what was passed over; raises instead if `strict`, or where no step is whole.
    """
    repo.check()
    damage: dict[int, IntegrityError] = {}
    gone: list[int] = []  # never committed, or deleted since they were listed
    found: tuple[int, Loaded] | None = None
    for number in reversed(repo.step_numbers()):
        try:
            found = number, read(repo[number])
            break
        except StepNotFound:
            gone.append(number)
        except IntegrityError as error:
            if not repo.store.exists(commit_name(number)):
                gone.append(number)
                continue
            if strict:
                raise
            damage[number] = error
    if gone and _newer(repo, -1 if found is None else found[0], damage):  # another process saves and deletes meanwhile
        return load_newest(repo, strict, read)
    sessions.distrusted(repo).update(damage)
    for passed_over in damage.values():
        if found is None:
            raise passed_over
        message = f"loaded the older step {found[0]} because a newer one is damaged: {passed_over}"
        log.error(message)
        warnings.warn(message, stacklevel=3)
    return found


def _newer(repo: Repository, than: int, known: Container[int]) -> bool:
    """Whether a step newer than one is committed that is not known."""
    numbers = [n for n in repo.step_numbers() if n > than and n not in known]
    return any(repo.store.exists(commit_name(n)) for n in numbers)


def load_checkpoint(
    checkpoint: Checkpoint, like: Any = None, only: Patterns | None = None, progress: Progress | None = None
) -> Any:
    """What `load` does, of one checkpoint."""
    if only is None:
        checkpoint.prefetch()
    tree = checkpoint.tree()
    wanted = None
    if only is not None:
        require_match((name for name, _ in entries(tree)), only, checkpoint.where)
        wanted = matcher(only)
    with collector_paused():
        filler = Filler(checkpoint.saved(), wanted, checkpoint.where)
        if like is None:
            finish = filler.rebuild(tree if wanted is None else select(tree, wanted))
        else:
            finish = filler.fill(like, tree) or (lambda: like)
    checkpoint.read(filler.targets, progress)
    return finish()


def open(url: Url) -> Repository:
    """Open the repository at `url` for reading; raise FormatError where there is none."""
    repo = open_repository(url)
    repo.check()
    return repo


def next_step(repo: Repository) -> int:
    """The number after the newest committed step, 0 in an empty repository."""
    steps = repo.steps()
    return steps[-1] + 1 if steps else 0


def check_step(step: int) -> int:
    """Return `step` as an int if it is a number that a step can have."""
    try:
        number = operator.index(step)
    except TypeError:
        raise CkptError(f"step {step!r} is no whole number") from None
    if not 0 <= number < 1 << 62:
        raise CkptError(f"step {number} is out of range: use 0, 1, 2 …")
    return number
