"""Reading shared by the ranks of a group: what several need of a block is read by one of them and handed to the others.

All ranks tell what they need, and each computes the same schedule from that (`turns.py`). Ranks of one host hand on through
memory that all of them see (`window.py`), others by messages, round by round, so that no rank holds more than some blocks
beside its own shard. Whoever gets bytes verifies them, whether from the store or from a rank: therefore a stretch of cells is
read by a rank that wants just these, and whole blocks by one that wants all.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ckpt.groups.base import Group, Message, ranks_text
from ckpt.leaves.base import Bytes
from ckpt.places import copies_of
from ckpt.read import READ_THREADS, STREAMS, Progress, Worker, read_blocks
from ckpt.storage.base import Store
from ckpt.storage.errors import InvalidArgument
from ckpt.storage.local import LocalStore
from ckpt.storage.threads import Threads
from ckpt.turns import COLUMNS, Job, Key, Need, Turn, blocks_of, is_divided, saves_reading, schedule
from ckpt.wanted import Wanted
from ckpt.window import RankFailed, Window

ShareReads = bool | Literal["auto"]

WINDOW_BYTES, MOST_WINDOW_BYTES = 64 << 20, 128 << 20
"""Memory through which the ranks of one host hand on what they read, at least and at most; in between two blocks for each."""


def read_together(
    store: Store, algorithm: str, order: list[Wanted], packs: Sequence[str], where: str, group: Group,
    share: ShareReads, progress: Progress | None = None, *, once: bool = False,
) -> None:  # fmt: skip
    """Like `read_blocks`, on every rank of a group. Every rank must come, whatever it needs.

    once: past the page cache, where no other rank is known to need the same bytes from it.

    Comes back without all where another rank has failed, and that one raises: `together` tells it to all.
    """
    one_host = group.size > 1 and group.one_host()  # before any question that ranks could answer each in its way
    if group.size == 1 or not (group.can_exchange or one_host):
        for block in order:
            block.once = once and group.size == 1
        read_blocks(store, algorithm, order, where, progress)
        return
    number = {name: i for i, name in enumerate(packs)}
    keys = [(number[w.row.pack or ""], w.row.position) for w in order]
    asked = zip(keys, order, strict=True) if share is not False else ()
    stretches = [(*k, w.row.raw, w.row.stored, *s) for k, w in asked for s in w.stretches()]
    facts, needs = _told(group, _facts(store, share, once), np.array(stretches, np.int64))
    by_key = dict(zip(keys, order, strict=True))
    blocks = blocks_of(needs)
    saves = saves_reading(blocks)
    in_common = one_host and all(told.local for told in facts)
    turns = schedule(blocks, group.size) if _is_shared(facts, saves, in_common) else {}
    window = _window(turns, group) if one_host else None
    by_messages = bool(turns) and window is None and group.can_exchange and (share is True or not in_common)
    if once:
        for key, wanted in by_key.items():
            wanted.once = share is not False and (window is not None or by_messages or not saves or is_divided(blocks[key]))
    taken = [(by_key.get(key), turn) for key, turn in turns.items()]
    alone = [w for k, w in by_key.items() if k not in turns]
    if window is not None:
        with window:
            goes_on = _through(window, store, algorithm, where, progress, group, taken)
        if goes_on:
            read_blocks(store, algorithm, alone, where, progress)
    elif by_messages:
        _by_messages(store, algorithm, where, progress, group, taken, alone)
    else:
        read_blocks(store, algorithm, order, where, progress)


class Facts(NamedTuple):
    """What a rank brings to the decision how to read: it is the same on all ranks, for all know that of all."""

    share: int
    """0: not; 1: yes; 2: "auto"."""
    local: int
    """Whether the copies that it would read lie in folders."""
    past_cache: int
    """Whether it would read them past the page cache."""


def _facts(store: Store, share: ShareReads, once: bool) -> Facts:
    copies = copies_of(store)
    local = all(isinstance(copy, LocalStore) for copy in copies)
    return Facts(2 if share == "auto" else int(share), int(local), int(once and copies[0].past_cache))


def _told(group: Group, facts: Facts, stretches: Need) -> tuple[list[Facts], list[Need]]:
    """What each rank has to say, and what it needs. Raises InvalidArgument where they want to share in different ways."""
    answers = [np.frombuffer(data, np.int64) for data in group.all_gather(np.append(np.array(facts), stretches).tobytes())]
    found = [Facts(*answer[: len(facts)].tolist()) for answer in answers]
    if other := [rank for rank, told in enumerate(found) if told.share != found[0].share]:
        named = {0: "False", 1: "True", 2: "'auto'"}
        raise InvalidArgument(
            f"share_reads={named[found[0].share]} on rank 0 and {named[found[other[0]].share]} on {ranks_text(other)}; "
            "give all ranks the same"
        )
    return found, [answer[len(facts) :].reshape(-1, COLUMNS) for answer in answers]


def _is_shared(facts: Sequence[Facts], saves: bool, in_common: bool) -> bool:
    """Whether ranks read for each other. Pure.

    in_common: what they read comes from folders of one host: then each copies from the page cache itself, unless it is read
    past that.
    """
    if facts[0].share != 2:
        return facts[0].share == 1
    return saves and (not in_common or all(told.past_cache for told in facts))


def _window(turns: Mapping[Key, Turn], group: Group) -> Window | None:
    """Memory for the blocks that go round; None where the ranks of this host can't have any."""
    if not turns:
        return None
    largest = max(turn.block.raw for turn in turns.values())
    slots = min(max(2 * group.size * largest, WINDOW_BYTES), MOST_WINDOW_BYTES) // largest
    if slots < 2:  # blocks as this version does not write them
        return None
    return Window.meet(group, min(slots, len(turns)), largest, sum(len(turn.jobs) for turn in turns.values()))


def _through(
    window: Window, store: Store, algorithm: str, where: str, progress: Progress | None, group: Group,
    turns: list[tuple[Wanted | None, Turn]],
) -> bool:  # fmt: skip
    """Read what is this rank's into the window, and put in place what it needs out of it, while the others do so too.

    turns: with what this rank wants of each block. Returns whether all is in place: it is not where another rank gave up.
    """
    mine = [
        (block, wanted, number, job)
        for block, (wanted, turn) in enumerate(turns) if wanted is not None
        for number, job in enumerate(turn.jobs, turn.first) if job.reader == group.rank
    ]  # fmt: skip
    todo, lock = iter(mine), threading.Lock()

    def read() -> None:
        worker = Worker(store, algorithm, where, progress)
        while True:
            with lock:  # in the order in which the window has room for them, and one waits for all
                found = next(todo, None)
                if found is None:
                    return
                block, wanted, number, job = found
                slot = window.to_fill(block)
            worker.fetch(wanted, job.begin, job.end, slot[job.begin : job.end])
            window.mark_ready(number)

    def place() -> None:
        worker = Worker(store, algorithm, where, None)
        for block, (wanted, turn) in enumerate(turns):
            if wanted is not None:
                for begin, end in wanted.stretches():
                    for number, job in enumerate(turn.jobs, turn.first):
                        if max(begin, job.begin) < min(end, job.end):
                            window.wait_for(number, job.reader)
                    worker.accept(wanted, begin, window.slot(block)[begin:end])
            window.pass_on(block)

    threads = READ_THREADS
    if not any(wanted.row.codec for _, wanted, _, _ in mine):  # else each holds all of a block
        threads = max(threads, STREAMS // group.size)
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            window.give_up()

    def both(pool: Threads) -> None:
        for _ in range(min(threads, len(mine))):
            pool.submit(guarded, read)
        place()

    try:
        with Threads(threads, "ckpt-read") as pool:
            guarded(lambda: both(pool))
        for error in errors:
            if not isinstance(error, RankFailed):
                raise error
        return not errors
    finally:
        for error in errors:
            traceback.clear_frames(error.__traceback__)  # they hold the memory as long as somebody holds the error
        errors.clear()


def _by_messages(
    store: Store, algorithm: str, where: str, progress: Progress | None, group: Group,
    turns: list[tuple[Wanted | None, Turn]], alone: list[Wanted],
) -> None:  # fmt: skip
    """Read what no other rank needs, then round by round what goes round."""
    failed: list[Exception] = []
    try:
        read_blocks(store, algorithm, alone, where, progress)
    except Exception as error:  # the others wait for what this rank is to read
        failed.append(error)
    rounds = 1 + max(turn.round for _, turn in turns)
    by_round: list[list[tuple[Wanted, Turn]]] = [[] for _ in range(rounds)]
    for wanted, turn in turns:
        if wanted is not None:
            by_round[turn.round].append((wanted, turn))
    for of_round in by_round:
        _round(store, algorithm, where, progress, group, of_round, failed)
    if failed:
        raise failed[0]


def _round(
    store: Store, algorithm: str, where: str, progress: Progress | None, group: Group,
    taken: list[tuple[Wanted, Turn]], failed: list[Exception],
) -> None:  # fmt: skip
    """Read what is this rank's, hand over, put in place. Goes on after an error: the others count on the messages."""
    rank = group.rank
    buffers = [[(first, np.empty(last - first, np.uint8)) for first, last in block.stretches()] for block, _ in taken]

    def within(i: int, begin: int, end: int) -> Bytes:
        first, buffer = next(it for it in reversed(buffers[i]) if it[0] <= begin)
        return buffer[begin - first : end - first]

    own = threading.local()  # a worker's memory is used again

    def read(i: int, job: Job) -> None:
        try:
            if not hasattr(own, "worker"):
                own.worker = Worker(store, algorithm, where, progress)
            own.worker.fetch(taken[i][0], job.begin, job.end, within(i, job.begin, job.end))
        except Exception as error:
            failed.append(error)

    def accept(i: int) -> None:
        try:
            for first, buffer in buffers[i]:
                Worker(store, algorithm, where, None).accept(taken[i][0], first, buffer)
        except Exception as error:
            failed.append(error)

    with Threads(READ_THREADS, "ckpt-read") as pool:
        reads = [(i, job) for i, (_, turn) in enumerate(taken) for job in turn.jobs if job.reader == rank]
        list(pool.map(lambda it: read(*it), reads))
        send: list[Message] = []
        receive: list[Message] = []
        for i, (block, turn) in enumerate(taken):  # of a block from first to last, as it is sent
            send += [(peer, within(i, begin, end).data) for peer, begin, end in turn.sent_by(rank)]
            for stretch in block.stretches():
                receive += [(peer, within(i, begin, end).data) for peer, begin, end in turn.received_by(rank, *stretch)]
        group.exchange(send, receive)
        list(pool.map(accept, range(len(taken))))
