"""Reading shared by the ranks of a group: what several need of a block is read by one of them and handed to the others.

All ranks tell what they need, and each computes the same schedule from that. Ranks of one host hand on through memory that all
of them see (`window.py`), others by messages, round by round, so that no rank holds more than some blocks beside its own shard.
Whoever gets bytes verifies them, whether from the store or from a rank: therefore a stretch of cells is read by a rank that
wants just these, and whole blocks by one that wants all.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from ckpt.digest import CELL_BYTES
from ckpt.groups.base import Group, Message, ranks_text
from ckpt.leaves.base import Bytes
from ckpt.places import copies_of
from ckpt.plan import BLOCK_BYTES
from ckpt.read import READ_THREADS, Progress, Wanted, Worker, read_blocks
from ckpt.storage.base import Store
from ckpt.storage.errors import InvalidArgument
from ckpt.storage.local import LocalStore
from ckpt.storage.threads import Threads
from ckpt.window import RankFailed, Window

ShareReads = bool | Literal["auto"]

ROUND_BYTES = 96 << 20
"""Blocks that a rank reads, sends and receives in one round."""

WINDOW_BYTES, MOST_WINDOW_BYTES = 64 << 20, 128 << 20
"""Memory through which the ranks of one host hand on what they read, at least and at most; in between two blocks for each."""

_WORTH = 1.05  # what the group reads over what there is, from which on sharing begins

Need = np.ndarray
"""Rows of (pack, position, raw bytes, stored bytes, from, to), one a stretch, in the order in which they lie."""

_COLUMNS = 6

Key = tuple[int, int]
"""Pack and position of a block."""


class Stretch(NamedTuple):
    """Bytes [begin, end) of a raw block."""

    begin: int
    end: int
    nbytes: int
    """To be read for it."""
    ranks: Sequence[int]
    """Those that can read and verify it."""


class Part(NamedTuple):
    """A part that a rank needs of a block that it does not need whole, from and to."""

    rank: int
    begin: int
    end: int


@dataclass(slots=True)
class Block:
    """What the ranks need of one block."""

    raw: int
    stored: int
    """The bytes to read for all of it."""
    whole: list[int] = field(default_factory=list)
    """The ranks that need all of it."""
    parts: list[Part] = field(default_factory=list)
    alone: int = 0
    """The bytes that are read where each rank reads for itself."""
    _united: list[Stretch] | None = None

    def united(self) -> list[Stretch]:
        """What is to be read of it, each byte once. All of it where a rank needs it all; else what lies between two edges."""
        if self._united is None:
            self._united = self._unite()
        return self._united

    def _unite(self) -> list[Stretch]:
        if self.whole:
            return [Stretch(0, self.raw, self.stored, self.whole)]
        changes: dict[int, list[int]] = {}  # at each edge the ranks that want what follows, if they did not before
        for rank, begin, end in self.parts:
            changes.setdefault(begin, []).append(rank)
            changes.setdefault(end, []).append(rank)
        found, ranks = [], set[int]()
        for begin, end in itertools.pairwise(sorted(changes)):
            ranks.symmetric_difference_update(changes[begin])
            if ranks:
                found.append(Stretch(begin, end, end - begin, sorted(ranks)))
        return found

    def takers(self) -> Iterator[Part]:
        """What each rank needs of it."""
        yield from (Part(rank, 0, self.raw) for rank in self.whole)
        yield from self.parts


class Job(NamedTuple):
    """A stretch of a block, and who reads it."""

    begin: int
    end: int
    reader: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One block on its way: when, who reads what of it, and who needs it. Jobs are in the same order on all ranks."""

    round: int
    jobs: list[Job]
    block: Block
    first: int
    """The number of its first job, of those of all blocks."""

    def sent_by(self, rank: int) -> Iterator[Part]:
        """What a rank sends, and to whom."""
        for begin, end, reader in self.jobs:
            if reader == rank:
                for taker, first, last in self.block.takers():
                    if taker != rank and max(begin, first) < min(end, last):
                        yield Part(taker, max(begin, first), min(end, last))

    def received_by(self, rank: int, first: int, last: int) -> Iterator[Part]:
        """What a rank that needs these bytes receives, and from whom."""
        for begin, end, reader in self.jobs:
            if reader != rank and max(begin, first) < min(end, last):
                yield Part(reader, max(begin, first), min(end, last))


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
    stretches = [(*k, w.row.raw, w.row.stored, *s) for k, w in zip(keys, order, strict=True) for s in w.stretches()]
    if share is False:
        stretches = []
    facts, needs = _told(group, _facts(store, share, once), np.array(stretches, np.int64))
    by_key = dict(zip(keys, order, strict=True))
    blocks = blocks_of(needs)
    saves = _saves(blocks)
    in_common = one_host and all(told.local for told in facts)
    turns = schedule(blocks, group.size) if _is_shared(facts, saves, in_common) else {}
    window = _window(turns, group) if one_host else None
    by_messages = bool(turns) and window is None and group.can_exchange and (share is True or not in_common)
    if once:
        for key, wanted in by_key.items():
            wanted.once = share is not False and (window is not None or by_messages or not saves or _is_divided(blocks[key]))
    taken = [(by_key.get(key), turn) for key, turn in turns.items()]
    alone = [w for k, w in by_key.items() if k not in turns]
    if window is not None:
        with window:
            goes_on = _through(window, store, algorithm, where, progress, group.rank, taken)
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
    return found, [answer[len(facts) :].reshape(-1, _COLUMNS) for answer in answers]


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
    window: Window, store: Store, algorithm: str, where: str, progress: Progress | None, rank: int,
    turns: list[tuple[Wanted | None, Turn]],
) -> bool:  # fmt: skip
    """Read what is this rank's into the window, and put in place what it needs out of it, while the others do so too.

    turns: with what this rank wants of each block. Returns whether all is in place: it is not where another rank gave up.
    """
    mine = [
        (block, wanted, number, job)
        for block, (wanted, turn) in enumerate(turns) if wanted is not None
        for number, job in enumerate(turn.jobs, turn.first) if job.reader == rank
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

    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            window.give_up()

    def both(pool: Threads) -> None:
        for _ in range(min(READ_THREADS, len(mine))):
            pool.submit(guarded, read)
        place()

    try:
        with Threads(READ_THREADS, "ckpt-read") as pool:
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


def blocks_of(needs: Sequence[Need]) -> dict[Key, Block]:
    """What the ranks need, by block."""
    found: dict[Key, Block] = {}
    for rank, need in enumerate(needs):
        for pack, position, raw, stored, begin, end in need.tolist():
            if (block := found.get((pack, position))) is None:
                block = found[pack, position] = Block(raw, stored)
            block.alone += stored if end - begin == raw else end - begin
            if end - begin == raw:
                block.whole.append(rank)
            else:
                block.parts.append(Part(rank, begin, end))
    return found


def schedule(blocks: Mapping[Key, Block], size: int) -> dict[Key, Turn]:
    """The turn of each block of which several of `size` ranks need the same bytes. Pure; the same on every rank.

    Of those that can read a stretch it is read by the one that has the fewest bytes to read so far. A round is full for a
    rank at ROUND_BYTES.
    """
    load = [0] * size
    shared: dict[Key, list[Stretch]] = {}
    for key in sorted(blocks):
        united = blocks[key].united()
        if blocks[key].alone > _bytes(united):
            shared[key] = united
            continue
        for stretch in united:
            load[stretch.ranks[0]] += stretch.nbytes
    held = [0] * size
    found: dict[Key, Turn] = {}
    count = 0
    for key, united in shared.items():
        block = blocks[key]
        jobs: list[Job] = []
        for begin, end, nbytes, ranks in united:
            before = jobs[-1] if jobs and jobs[-1].end == begin else None
            if before is not None and before.reader in ranks and nbytes <= CELL_BYTES:
                reader = before.reader  # the cell at a border: one read of two stretches costs one call
            else:
                reader = min(ranks, key=lambda r: (load[r], before is None or r != before.reader, r))
            load[reader] += nbytes
            if before is not None and before.reader == reader:
                jobs[-1] = Job(before.begin, end, reader)
            else:
                jobs.append(Job(begin, end, reader))
        takers = [part.rank for part in block.takers()]
        first = max(held[rank] for rank in takers)
        if first % ROUND_BYTES + block.raw > ROUND_BYTES:
            first = (first // ROUND_BYTES + 1) * ROUND_BYTES
        for rank in takers:
            held[rank] = first + block.raw
        found[key] = Turn(first // ROUND_BYTES, jobs, block, count)
        count += len(jobs)
    return found


def _bytes(stretches: Sequence[Stretch]) -> int:
    return sum(stretch.nbytes for stretch in stretches)


def _saves(blocks: Mapping[Key, Block]) -> bool:
    """Whether the group reads much less where ranks read for each other."""
    total = sum(block.alone for block in blocks.values())
    return total > _WORTH * sum(_bytes(block.united()) for block in blocks.values())


def _is_divided(block: Block) -> bool:
    """Whether ranks that need a block read different bytes of it, but for the cells at their borders."""
    united = block.united()
    return block.alone <= _bytes(united) + (len(united) - 1) * CELL_BYTES


assert ROUND_BYTES > BLOCK_BYTES
