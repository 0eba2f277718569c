"""save, load, open: the whole of the library for most users."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable
from typing import Any, Literal, overload

from ckpt.block_io.block_reader import Progress
from ckpt.block_io.read_plan import BlockRead, plan_reads
from ckpt.errors import StepNotFound
from ckpt.format.codec import CodecOption
from ckpt.format.signature import KeyOption
from ckpt.groups import as_group
from ckpt.loading.alias_check import check_aliasing
from ckpt.loading.group_load import (
    LoadRequest,
    load_newest_on_all_ranks,
    open_agreed_checkpoint,
    require_same_step,
    run_on_all_ranks,
)
from ckpt.loading.shared_read import ShareReads, read_shared
from ckpt.loading.target_matching import Finish, TargetMatcher
from ckpt.repository.checkpoint import Checkpoint
from ckpt.repository.repository import Repository, Url, open_repository, resolve_url
from ckpt.repository.retention import Keep, as_keep
from ckpt.saving import session_registry as sessions
from ckpt.saving.handle import SaveHandle
from ckpt.saving.nan_check import NanOption
from ckpt.saving.options import Options
from ckpt.saving.pipeline import flatten_state, require_same_step_as_rank_0
from ckpt.saving.pipeline import save as run_save
from ckpt.saving.rank_parts import TIMEOUT_SECONDS
from ckpt.state.name_mapping import Rename, rename_tree
from ckpt.state.name_patterns import Patterns, entries, matcher, require_match, select
from ckpt.storage.base.errors import InvalidArgument
from ckpt.support.runtime import collector_paused
from ckpt.support.validation import check_switch

log = logging.getLogger("ckpt")


@overload
def save(
    state: Any, url: Url | None = None, step: int | None = None, *, blocking: Literal[True] = True, codec: CodecOption = "auto",
    digest: str = "auto", keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False,
    group: Any = "auto", timeout: float = TIMEOUT_SECONDS, verify_replicas: bool | None = None, key: KeyOption = None,
    nan: NanOption = "warn",
) -> Checkpoint: ...  # fmt: skip
@overload
def save(
    state: Any, url: Url | None = None, step: int | None = None, *, blocking: Literal[False], codec: CodecOption = "auto",
    digest: str = "auto", keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False,
    group: Any = "auto", timeout: float = TIMEOUT_SECONDS, verify_replicas: bool | None = None, key: KeyOption = None,
    nan: NanOption = "warn",
) -> SaveHandle: ...  # fmt: skip
def save(
    state: Any, url: Url | None = None, step: int | None = None, *, blocking: bool = True, codec: CodecOption = "auto",
    digest: str = "auto", keep: int | Keep | None = None, memory: int | None = None, overwrite: bool = False,
    group: Any = "auto", timeout: float = TIMEOUT_SECONDS, verify_replicas: bool | None = None, key: KeyOption = None,
    nan: NanOption = "warn",
) -> Checkpoint | SaveHandle:  # fmt: skip
    """Save `state` as one step of the repository at `url`, which is made if it is not there.

    url: here as everywhere, without it: the one that `ckpt-run --dir` or the environment (CKPT_DIR) names.
    state: any nesting of dict, list, tuple, namedtuple and dataclass over numpy, torch and jax arrays, plain values,
        and objects with state_dict() and load_state_dict().
    step: its number; None takes the one after the newest.
    blocking: True returns the checkpoint when it is durable and committed. False returns a handle as soon as the state
        is copied and may change; `handle.result()` waits, and an error that nobody asked for is raised by the next
        save to the same URL.
    codec: "auto", "none", a numcodecs codec or configuration, or {name pattern: one of those}.
    digest: of blocks, manifest and tree: "xxh3-128", or "blake3"; "auto" is the former, and with a key the latter. Either finds
        damage. Neither protects against somebody who may write to the repository, and can change the digests too: a key does.
    keep: delete all but the newest so many steps (or see `ckpt.Keep`) after the commit.
    memory: staging memory in bytes. A state larger than that is staged in pieces, as fast as it can be written.
    overwrite: replace the step if it is there.
    group: the ranks that save this state together: an mpi4py communicator, a torch process group, `ckpt.groups.Group`; None for
        this process alone. "auto" takes what is initialised (torch.distributed, jax.distributed, MPI), else what the
        environment says (RANK and WORLD_SIZE …). Every rank of the group must call.
    timeout: seconds that a step waits for the slowest rank; not the first save of a group, for all to come: that has 600 s, or
        the timeout of the torch process group.
    verify_replicas: which bytes ranks compare of arrays that should be equal copies; a step whose copies differ is refused.
        None: all of small plain arrays, a sample of larger ones. True: everything that several ranks hold, which reads the
        state once more. False: nothing; of copies that differ the step then has a mixture.
    key: a key file (a key of 32 bytes or more in hexadecimal digits on each line; the first signs, each is accepted), or a key
        as bytes; else the file that the environment names (CKPT_KEY_FILE). The step is signed with it, and a step that is not
        signed with it counts as damaged. All ranks have the same key. See docs/reference/integrity.md.
    nan: "warn" logs one warning with the name of a leaf that has a NaN, "refuse" saves no such step (NotFinite), "allow" does
        not look. Looked at are all elements of pieces of up to 64 KiB, and samples of larger ones:
        see docs/reference/saving.md.

    Raises UnsupportedLeaf, RepositoryBusy, AlreadyExists, StoreError, Fenced, StepRefused, RanksMissing; nothing is
    changed then.
    """
    check_switch("blocking", blocking)
    kept = as_keep(keep)
    options = Options(codec, digest, memory, kept, overwrite, timeout=timeout, verify_replicas=verify_replicas, nan=nan)
    number = None if step is None else check_step(step)
    repo = open_repository(resolve_url(url), key)
    ranks = as_group(group)
    # A group first meets: where one rank has a leaf that can't be stored, it can then tell the others.
    ready = flatten_state(state, ranks) if ranks.size == 1 else state
    session = sessions.enter(repo, ranks, requested_step=(number,))
    try:
        require_same_step_as_rank_0(session, number)
        handle = run_save(session, ready, number, options, blocking)
    except BaseException:
        sessions.leave(session, keep=True)
        raise
    if blocking:
        sessions.leave(session, keep=True)
        return handle.result()
    handle.when_done(lambda: sessions.leave(session, keep=True))
    return handle


def load(
    url: Url | None = None, like: Any = None, *, step: int | None = None, only: Patterns | None = None, strict: bool = False,
    rename: Rename | None = None, progress: Progress | None = None, group: Any = "auto", share_reads: ShareReads = "auto",
    key: KeyOption = None,
) -> Any:  # fmt: skip
    """Load a step, by default the newest that is whole, and return the state.

    like: a state whose arrays are filled in place; it may be a part of what was saved. Without it new arrays are made,
        on the host, of the kinds that were saved.
    step: a number. The newest otherwise; where its files turn out damaged the one before is taken, with a warning.
    only: names or shell patterns of the leaves to load, such as "model.*"; the others stay as they are in `like`, and
        are left out without it (in a list or tuple: None). With `rename` they are names in `like`.
    strict: raise instead of falling back to an older step.
    rename: where the names of `like` are not those that were saved: a function from a name in `like` to the saved one, or
        {regular expression: replacement} as of re.sub.
    group: the ranks that load together, as for `ckpt.save`; all of them load the same step. Each reads what lies in its own
        shards, whatever the layout was when it was saved.
    share_reads: whether what several ranks need is read by one of them and handed to the others, through memory where all
        run on one host. "auto": where that saves reading and they could not as well copy it from a page cache in common.
    progress: called with the number of bytes just read, from several threads.
    key: as for `ckpt.save`. A step that is not signed with it counts as damaged (SignatureError, an IntegrityError). Without a
        key no signature is checked. The log (logger `ckpt`, INFO) says by what the bytes were checked.

    Raises StepNotFound, LeafNotFound and LeafMismatch before anything is changed, and IntegrityError, after which the
    arrays of `like` may hold a mixture. So they may after a LeafMismatch that says an object "refused the state": what it
    takes only its load_state_dict can tell, which comes last.
    """
    repo = open_repository(resolve_url(url), key)
    ranks = as_group(group)
    request = LoadRequest(like, only, progress, rename, ranks, share_reads)
    check_switch("strict", strict)
    if step is not None:
        return load_step(repo, check_step(step), request)
    found = load_newest(repo, strict, request)
    if found is None:
        raise StepNotFound(f"{repo.url} has no committed step to load")
    return found[1]


def load_step(repo: Repository, step: int, request: LoadRequest) -> Any:
    """Load a step that was named."""
    if request.group.size > 1:
        request.group.meet_at(repo.store)
        require_same_step(request.group, step)
    return load_checkpoint(functools.partial(open_agreed_checkpoint, repo, step, request.group), request)


def load_newest(repo: Repository, strict: bool, request: LoadRequest, before: int | None = None) -> tuple[int, Any] | None:
    """The newest step that is whole, and what was loaded of it; None where no step is committed.

    before: the newest below this one, if there is any.

    Says with a warning and in the log what was passed over; raises instead if `strict`, or where no step is whole.
    """
    return load_newest_on_all_ranks(repo, strict, request, load_checkpoint, before)


def load_checkpoint(find: Callable[[], Checkpoint], request: LoadRequest) -> Any:
    """What `load` does, of one checkpoint. Every rank of a group comes to the end of each part, or all raise."""
    group = request.group
    checkpoint = find()  # which all ranks do together
    bypass_cache = request.bypass_cache or checkpoint.commit.world_size > 1  # one of many ranks is hardly loaded for a look
    read_plan, finish = run_on_all_ranks(group, lambda: _plan_load(checkpoint, request, bypass_cache))
    algorithm, where = checkpoint.manifest().digest_algorithm, checkpoint.where
    packs = [file.name for file in checkpoint.commit.packs]
    run_on_all_ranks(
        group,
        lambda: read_shared(
            checkpoint.store,
            algorithm,
            read_plan,
            packs,
            where,
            group,
            request.share_reads,
            request.progress,
            bypass_cache=bypass_cache,
        ),
    )
    loaded = run_on_all_ranks(group, finish)
    log.info("loaded %s: %s", checkpoint.where, checkpoint.protection)
    return loaded


def _plan_load(checkpoint: Checkpoint, request: LoadRequest, bypass_cache: bool) -> tuple[list[BlockRead], Finish]:
    """What to read, and how to make the result of it. Nothing of `like` is changed yet."""
    like, only = request.like, request.only
    if only is None and request.group.size == 1 and not bypass_cache:  # else this rank may need only a part
        checkpoint.prefetch()
    tree = checkpoint.tree()
    selector = None if only is None else matcher(only)
    where = checkpoint.where
    if like is not None and request.rename is not None:
        with collector_paused():
            tree = rename_tree(tree, like, request.rename, selector, where)
        where = f"`like`, renamed for {where},"
    if only is not None:
        require_match((name for name, _ in entries(tree)), only, where)
    with collector_paused():
        target_matcher = TargetMatcher(checkpoint.saved(), selector, checkpoint.where, checkpoint.manifest().bytes_of_leaves)
        if like is None:
            finish = target_matcher.rebuild(tree if selector is None else select(tree, selector))
        else:
            finish = target_matcher.match(like, tree) or (lambda: like)
        targets = target_matcher.read_targets()
        if like is not None:
            check_aliasing(targets, checkpoint.manifest(), checkpoint.where, target_matcher.aliases)
    return plan_reads(checkpoint.manifest(), targets, checkpoint.where), finish


def open(url: Url | None = None, *, key: KeyOption = None) -> Repository:
    """Open the repository at `url` for reading; raise StepNotFound where nothing is there yet, FormatError where
    something else is. key: as for `ckpt.load`."""
    repo = open_repository(resolve_url(url), key)
    repo.check()
    return repo


def check_step(step: int) -> int:
    """Return `step` as an int if it is a number that a step can have."""
    try:
        number = operator.index(step)
    except TypeError:
        given: Any = step
        what = repr(given) if given is None or isinstance(given, (str, float)) else f"a {type(given).__name__}"
        raise InvalidArgument(f"step must be a whole number, 0, 1, 2 …, and not {what}") from None
    if not 0 <= number < 1 << 62:
        raise InvalidArgument(f"step {number} is out of range: use 0, 1, 2 …")
    return number
