"""The functions save, load and open, which are the whole library for most users."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, overload

from ckpt.block_io.read_plan import BlockRead, plan_reads
from ckpt.format.codec import CodecOption
from ckpt.format.signature import KeyOption
from ckpt.groups import as_group
from ckpt.loading.alias_check import check_aliasing
from ckpt.loading.finish_functions import Finish
from ckpt.loading.newest_step_load import load_newest_on_all_ranks
from ckpt.loading.own_values import select_own_values
from ckpt.loading.rank_agreement import (
    LoadRequest,
    open_agreed_checkpoint,
    require_same_step,
    run_on_all_ranks,
)
from ckpt.loading.read_ahead import reading_ahead
from ckpt.loading.shared_read import BlockSource, ShareReads, read_shared
from ckpt.loading.target_matching import TargetMatcher
from ckpt.loading.wrapped_values import split_off_wrapped_values
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import Repository, Url, open_repository, resolve_url
from ckpt.repository.retention import Keep, as_keep
from ckpt.saving import session_registry
from ckpt.saving.commit_wait import COMMIT_TIMEOUT_SECONDS
from ckpt.saving.handle import SaveHandle
from ckpt.saving.lone_rank_warning import group_that_saves
from ckpt.saving.nan_check import NanOption
from ckpt.saving.options import DifferenceOption, Options
from ckpt.saving.pipeline import save as run_save
from ckpt.saving.save_plan import flatten_state
from ckpt.saving.skipped_step import require_same_step_as_rank_0
from ckpt.state.leaves.shared_objects import leaves_of_one_state
from ckpt.state.name_mapping import Rename, rename_tree
from ckpt.state.name_patterns import Patterns, entries, matcher, require_match, select
from ckpt.state.tree_rebuild import refusing_deep_trees
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.base.store import ByteProgress
from ckpt.support.runtime import collector_paused, require_stack
from ckpt.support.validation import check_switch

log = logging.getLogger("ckpt")


@overload
def save(
    state: Any, url: Url | None = None, step: int | None = None, *, blocking: Literal[True] = True, codec: CodecOption = "auto",
    digest: str = "auto", keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False,
    group: object = "auto", timeout: float = COMMIT_TIMEOUT_SECONDS, verify_replicas: bool | None = None, key: KeyOption = None,
    nan: NanOption = "warn", full_every: DifferenceOption = "auto",
) -> Checkpoint: ...  # fmt: skip
@overload
def save(
    state: Any, url: Url | None = None, step: int | None = None, *, blocking: Literal[False], codec: CodecOption = "auto",
    digest: str = "auto", keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False,
    group: object = "auto", timeout: float = COMMIT_TIMEOUT_SECONDS, verify_replicas: bool | None = None, key: KeyOption = None,
    nan: NanOption = "warn", full_every: DifferenceOption = "auto",
) -> SaveHandle: ...  # fmt: skip
def save(
    state: Any, url: Url | None = None, step: int | None = None, *, blocking: bool = True, codec: CodecOption = "auto",
    digest: str = "auto", keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False,
    group: object = "auto", timeout: float = COMMIT_TIMEOUT_SECONDS, verify_replicas: bool | None = None, key: KeyOption = None,
    nan: NanOption = "warn", full_every: DifferenceOption = "auto",
) -> Checkpoint | SaveHandle:  # fmt: skip
    """Save `state` as one step of the repository at `url`, and create the repository if it does not exist.

        checkpoint = ckpt.save({"model": model, "optimizer": optimizer}, "/data/run", step=10, keep=3)

    state: any nesting of dict, list, tuple, namedtuple and dataclass over arrays of numpy, torch, jax, TensorFlow,
        PaddlePaddle and MindSpore, plain values, and objects with state_dict() and load_state_dict().
    url: a path, a URL or a `Store`. None, in every function of this library, means the URL in the environment variable
        CKPT_DIR, which `ckpt-run --dir` sets.
    step: the number of the step, 0 or more. None means the number after the newest step, and after running saves.
    blocking: True returns the checkpoint when the step is durable and committed. False returns a handle when the state has been
        copied and may change. `handle.result()` then waits for the commit. If the save fails and the caller has not seen its
        error, the next save to the same URL raises SaveFailed.
    codec: "auto", "none", a numcodecs codec or its configuration, or {name pattern: one of those}. "auto" compresses where this
        makes the save faster, within 2 % of the processor time of the training.
    digest: the hash of blocks, manifest and tree: "xxh3-128" or "blake3". "auto" is blake3 with a key, else xxh3-128.
        Both find damage. Neither protects against somebody who may write to the repository, and so can replace the digests. A
        key protects against that.
    keep: how many of the newest steps to keep, or a `ckpt.Keep`. Older steps are deleted after the commit. None deletes none.
    memory: bytes of staging memory; two blocks (at most 16 MiB) are used in any case. A state larger than that is staged in
        several parts, as fast as the store takes them.
    overwrite: whether to replace the step if it exists.
    group: the ranks that save this state together, as an mpi4py communicator, a torch process group or a `ckpt.groups.Group`.
        None means this process alone. "auto" takes the group that is initialised (torch.distributed, jax.distributed, MPI), or
        else the one that the environment describes (RANK and WORLD_SIZE …). Every rank of the group must call `save`.
    timeout: seconds that a step waits for the slowest rank. The first save of a group waits for all ranks to meet, for 600 s or
        for the timeout of the torch process group.
    verify_replicas: which bytes of replicas the ranks compare before a commit. A step whose replicas differ is refused.
        None compares small plain arrays as a whole and samples of larger ones. True compares all replicas, which reads the
        state once more. False compares nothing, so that a step of replicas that differ is a mixture of them.
    key: the path of a key file, or one key as bytes. A key file has one key of 32 bytes or more in hexadecimal digits on each
        line; the first key signs, and all keys are accepted. None means the key file in CKPT_KEY_FILE, if it is set. A step
        without a valid signature then counts as damaged. All ranks need the same key. See docs/reference/integrity.md.
    nan: "warn" logs one warning with the name of a leaf that has a NaN. "refuse" raises NotFinite and saves nothing. "allow"
        does not check. A piece of an array of up to 64 KiB is checked as a whole, a larger one in samples: see
        docs/reference/saving.md.
    full_every: store changed blocks as differences to the last full ones where that is smaller. The first save in each range of
        `full_every` step numbers stores them in full. "auto" does so with `codec="auto"` where differences halve the time of a
        save, as predicted from measured speeds. None stores no differences. See docs/reference/saving.md.

    After any error, all earlier steps are unchanged.

    Returns:
        The committed `Checkpoint`, or a `SaveHandle` with `blocking=False`.

    Raises:
        InvalidArgument: An argument has a value that makes no sense.
        UnsupportedLeaf: The state has a value that can't be stored without pickle. The message has its name.
        NotFinite: A leaf has a NaN, and `nan` is "refuse".
        StagingFailed: There was no memory to copy a leaf.
        RepositoryBusy: Another live process writes to the repository.
        AlreadyExists: The step exists, and `overwrite` is False.
        FormatError: Something other than a repository is at the URL, or a newer version wrote it.
        IntegrityError: The marker of the repository is damaged; SignatureError where the step exists and is not signed with
            `key`.
        StoreError: The store failed, for example because the disk is full; UnknownScheme where no store serves the URL.
        Fenced: A newer writer has taken over the repository.
        SaveFailed: An earlier save of this process in the background failed; its error is the cause.
        GroupError: The ranks could not meet, or do not agree on the step.
        StepRefused: The parts of the ranks do not form a complete step, or replicas differ.
        RanksMissing: A rank did not write its part within `timeout`.
    """
    check_switch("blocking", blocking)
    options = Options(codec=codec, digest=digest, memory=memory, keep=as_keep(keep), overwrite=overwrite, timeout=timeout,
                      verify_replicas=verify_replicas, nan=nan, full_every=full_every)  # fmt: skip
    number = None if step is None else check_step(step)
    repo = open_repository(resolve_url(url), key)
    ranks = group_that_saves(group)
    # In a group, `run_save` flattens the state after the ranks have met, so that a rank with a leaf that can't be stored can
    # report it to the others.
    ready = flatten_state(state, ranks) if ranks.size == 1 else state
    session = session_registry.enter(repo, ranks, requested_step=(number,))
    try:
        require_same_step_as_rank_0(session, number)
        handle = run_save(session, ready, number, options, blocking)
    except BaseException:
        session_registry.leave(session, keep=True)
        raise
    if blocking:
        session_registry.leave(session, keep=True)
        return handle.result()
    handle.when_done(lambda: session_registry.leave(session, keep=True))
    return handle


def load(
    url: Url | None = None, like: Any = None, *, step: int | None = None, only: Patterns | None = None, strict: bool = False,
    rename: Rename | None = None, progress: ByteProgress | None = None, group: object = "auto",
    share_reads: ShareReads = "auto", key: KeyOption = None,
) -> Any:  # fmt: skip
    """Load a step, by default the newest complete one, and return the state.

        state = ckpt.load("/data/run", like={"model": model, "optimizer": optimizer})

    url: as for `ckpt.save`.
    like: a state whose arrays are filled in place. It may be a part of the saved state. Without it, new arrays of the saved
        kinds are made in host memory.
    step: the number of the step. None means the newest; if its files are damaged, the one before is loaded with a warning.
    only: names or shell patterns of the leaves to load, such as "model.*". The other leaves of `like` stay unchanged. Without
        `like` they are left out (in a list or tuple they become None). With `rename` they are names in `like`.
    strict: whether to raise IntegrityError instead of falling back to an older step.
    rename: how to find the saved name of a leaf that has another name in `like`: a function from the name in `like` to the
        saved one, or {regular expression: replacement} as for re.sub.
    group: the ranks that load together, as for `ckpt.save`. All of them load the same step. Each reads the bytes of its own
        shards, whatever the shards of the save were.
    share_reads: whether one rank reads a block that several ranks need and passes it to the others, through shared memory if
        all run on one host. "auto" does so where it saves reads that a common page cache would not save.
    progress: a function that is called with the number of bytes just read, from several threads.
    key: as for `ckpt.save`. A step without a valid signature counts as damaged. Without a key no signature is checked. The
        logger `ckpt` records at level INFO which digests and which signature were checked.

    StepNotFound, LeafNotFound and LeafMismatch are raised before any array changes, with one exception: a LeafMismatch whose
    message contains "refused the state" comes from an object's load_state_dict, which runs last. After that one, and after an
    IntegrityError, the arrays of `like` may have a mixture of old and new values.

    Returns:
        The loaded state: `like` itself where it was given.

    Raises:
        InvalidArgument: An argument has a value that makes no sense.
        StepNotFound: The repository has no such committed step, or none at all.
        LeafNotFound: `like` has a leaf that the step does not have, or no leaf matches `only`.
        LeafMismatch: A leaf of `like` has another shape, dtype or kind than the saved one.
        UnsupportedLeaf: The code of an object in `like` failed, such as its state_dict().
        IntegrityError: Stored bytes are damaged; SignatureError where the step is not signed with `key`.
        FormatError: Something other than a repository is at the URL, or a newer version wrote it.
        StoreError: The store failed.
        GroupError: The ranks could not meet, or asked for different steps.
    """
    repo = open_repository(resolve_url(url), key)
    ranks = as_group(group)
    request = LoadRequest(like, only, progress, rename, ranks, share_reads)
    check_switch("strict", strict)
    if step is not None:
        return load_step(repo, check_step(step), request)
    found = load_newest(repo, strict, request)
    if found is None:
        raise repo.no_step_error()
    return found[1]


def load_step(repo: Repository, step: int, request: LoadRequest) -> Any:
    """Load the step of a given number and return the state."""
    require_stack()
    if request.group.size > 1:
        request.group.meet_at(repo.store)
        require_same_step(request.group, step)
    return load_checkpoint(functools.partial(open_agreed_checkpoint, repo, step, request.group), request)


def load_newest(
    repo: Repository, strict: bool, request: LoadRequest, restore_step_limit: int | None = None
) -> tuple[int, Any] | None:
    """Load the newest complete step; return its number and the state, or None if no step is committed.

    restore_step_limit: load the newest step below this number, if there is one.

    A damaged step is skipped with a warning and a line in the log. Raises IntegrityError with `strict`, or if every step is
    damaged.
    """
    require_stack()
    return load_newest_on_all_ranks(repo, strict, request, load_checkpoint, restore_step_limit)


def load_checkpoint(find: Callable[[], Checkpoint], request: LoadRequest) -> Any:
    """Load one checkpoint and return the state. All ranks of a group finish each stage together, or all of them raise.

    find: opens the checkpoint; all ranks call it together.
    """
    group = request.group
    checkpoint = find()
    # Multi-rank steps are almost always loaded to resume, so bypass the page cache.
    bypass_cache = request.bypass_cache or checkpoint.commit.world_size > 1
    # Where this process reads the step through the page cache, and mostly all of it, the disk need not wait for the plan.
    reads_all = request.only is None and group.size == 1 and not bypass_cache
    with reading_ahead(checkpoint) if reads_all else nullcontext():
        plan = refusing_deep_trees(checkpoint.where)(lambda: _plan_load(checkpoint, request))
        read_plan, finish = run_on_all_ranks(group, plan)
    source = BlockSource(checkpoint.store, checkpoint.manifest().digest_algorithm, checkpoint.where, request.progress)
    packs = [file.name for file in checkpoint.commit.packs]
    run_on_all_ranks(
        group, lambda: read_shared(source, read_plan, packs, group, request.share_reads, bypass_cache=bypass_cache)
    )
    loaded = run_on_all_ranks(group, finish)
    log.info("loaded %s: %s", checkpoint.where, checkpoint.protection)
    return loaded


def _plan_load(checkpoint: Checkpoint, request: LoadRequest) -> tuple[list[BlockRead], Finish]:
    """Return the blocks to read, and the function that returns the state once they are read. `like` does not change yet."""
    like, only = request.like, request.only
    tree = checkpoint.tree()
    selector = None if only is None else matcher(only)
    where = checkpoint.where
    if like is not None and request.rename is not None:
        with collector_paused():
            tree = rename_tree(tree, like, request.rename, selector, where)
        where = f"`like`, renamed for {where},"
    if only is not None:
        require_match((name for name, _ in entries(tree)), only, where)
    with collector_paused(), leaves_of_one_state():
        target_matcher = TargetMatcher(checkpoint.saved(), selector, checkpoint.where, checkpoint.manifest().bytes_of_leaves)
        if like is None:
            finish = target_matcher.rebuild(tree if selector is None else select(tree, selector))
        else:
            fill = target_matcher.match(like, tree) or (lambda: like)
            wrapped = split_off_wrapped_values(target_matcher, checkpoint)
            finish = wrapped.write_before(fill)
            select_own_values(target_matcher, checkpoint, request.group, wrapped.names)
        targets = target_matcher.read_targets()
        if like is not None:
            check_aliasing(targets, checkpoint.manifest(), checkpoint.where, target_matcher.aliases)
    return plan_reads(checkpoint.manifest(), targets, checkpoint.where), finish


def open(url: Url | None = None, *, key: KeyOption = None) -> Repository:
    """Open the repository at `url` for reading, and return it.

        for checkpoint in ckpt.open("/data/run"):
            print(checkpoint.step, checkpoint["model.embed.weight"][0:8])

    url: as for `ckpt.save`.
    key: as for `ckpt.load`.

    Returns:
        The `Repository`. It reads records and manifests when they are needed.

    Raises:
        InvalidArgument: An argument has a value that makes no sense.
        StepNotFound: Nothing exists at the URL yet.
        FormatError: Something other than a repository is at the URL, or a newer version wrote it.
        IntegrityError: The marker of the repository is damaged.
        StoreError: The store failed; UnknownScheme where no store serves the URL.
    """
    repo = open_repository(resolve_url(url), key)
    repo.check()
    return repo


def check_step(step: int) -> int:
    """Return `step` as an int; raise InvalidArgument if no step can have this number."""
    try:
        number = operator.index(step)
    except TypeError:
        given: object = step
        what = repr(given) if given is None or isinstance(given, (str, float)) else f"a {type(given).__name__}"
        raise InvalidArgument(f"step must be a whole number, 0, 1, 2 …, and not {what}") from None
    if not 0 <= number < 1 << 62:
        raise InvalidArgument(f"step {number} is out of range: use 0, 1, 2 …")
    return number
