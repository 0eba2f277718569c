"""Moving what a namespace holds: off a member, off one that is taken out for ever, or to where placement wants it today."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ckpt.aggregator import etcd
from ckpt.aggregator.fanout import in_order
from ckpt.aggregator.files import File, Layout, share_bytes
from ckpt.aggregator.namespace import Namespace
from ckpt.aggregator.placement import choose
from ckpt.aggregator.repair import FILES_AT_ONCE, Repaired, newest, parts, repair, replace_layout
from ckpt.aggregator.restoring import restore
from ckpt.aggregator.succession import succeed
from ckpt.aggregator.survey import Progress, require_made, survey
from ckpt.aggregator.writing import Gone
from ckpt.storage.errors import CkptError, InvalidArgument

_BATCH = 1_000
_QUIET_SECONDS = 1.0


def drain(namespace: Namespace, member: str, progress: Progress = lambda _: None) -> Repaired:
    """Move every fragment off a member, to others. Nothing new goes there only once its weight is 0.

    Raises InvalidArgument where the member is read-only: it could delete nothing, and its records would fall behind.
    """
    if member not in namespace.places:
        raise InvalidArgument(f"{member} is no member of {namespace.url}; there are {', '.join(namespace.places)}")
    answers, _ = namespace.fan_out.ask({member: namespace.places[member].info}, namespace.commit_seconds)
    if member in answers and answers[member].state == "read-only":
        raise InvalidArgument(
            f"{member} is read-only, so that it can't delete what moves away; start it without --read-only and give it the "
            "weight 0, or `ckpt-node admin forget` it, which works as it is"
        )
    return _drain(namespace, member, progress)


def _drain(namespace: Namespace, member: str, progress: Progress) -> Repaired:

    def leaving(layout: Layout, index: int, version: str) -> set[str]:
        return {member}

    return _move(namespace, leaving, {member}, progress)


def forget(namespace: Namespace, member: str, destroyed: bool = False, progress: Progress = lambda _: None) -> Repaired:
    """Take a member out for ever: what it holds goes to others, and so do the records that it keeps.

    destroyed: its device never comes back. Must be said where, of two members, the other alone is left to agree to it.
    """
    config = namespace.config
    require_made(namespace)
    if member not in namespace.ring.everyone and member not in namespace.places:
        raise InvalidArgument(f"{member} is no member of {namespace.url}; there are {', '.join(namespace.places)}")
    answers, _ = namespace.fan_out.ask({m: p.info for m, p in namespace.places.items()}, namespace.commit_seconds)
    needed = config.redundancy
    stay = [s for s in namespace.spots if s.name != member and s.name in answers]
    if len(stay) < needed.fragments:
        raise InvalidArgument(
            f"without {member} {len(stay)} members answer and {needed} needs {needed.fragments}; start the others, or another "
            "one and name it in the URL, or write with less redundancy"
        )
    succeed(namespace, stay, member, destroyed)  # from now on whoever writes is told to leave it alone
    done, quiet = Repaired(), 0
    while member in answers and not destroyed and quiet < 2:  # until nothing is left that was under way then
        moved = _drain(namespace, member, progress)
        done.files, done.nbytes = done.files + moved.files, done.nbytes + moved.nbytes
        if moved.failed:
            return replace(done, failed=moved.failed)
        quiet = 0 if moved.files else quiet + 1
        if quiet:  # a record that was half-done then may come through a moment later; its writer moves it, too
            time.sleep(_QUIET_SECONDS)
    if config.announced:
        etcd.forget(*etcd.parse_url(config.announced), member, access=config.etcd)
    namespace.leave_out(member)
    rest = repair(namespace, survey(namespace), progress=progress)
    return replace(rest, files=rest.files + done.files, nbytes=rest.nbytes + done.nbytes)


def rebalance(namespace: Namespace, progress: Progress = lambda _: None, expect: Progress = lambda _: None) -> Repaired:
    """Move fragments to the members that placement proposes today: to new members, and to those that were away.

    New members keep records from then on, too, and more of them each record if more of them may be lost.
    """
    require_made(namespace)
    namespace.meet(namespace.commit_seconds, everyone=True)
    every = {s.name: s for s in (*namespace.ring.members, *(m.spot for m in namespace.config.members))}
    spots = namespace.placed(every.values())
    succeed(namespace, spots, tolerated=namespace.config.redundancy.tolerated)
    namespace.spots = spots

    def leaving(layout: Layout, index: int, version: str) -> set[str]:
        piece = layout.pieces[index]
        there = {layout.holders[f.holder].member for f in piece.fragments if f is not None}
        key = f"{version}/{index}"
        return there - set(choose(key, namespace.spots, len(piece.fragments), namespace.near))

    return _move(namespace, leaving, set(), progress, expect)


def _move(
    namespace: Namespace, leaving: Callable[[Layout, int, str], set[str]], avoid: set[str], progress: Progress,
    expect: Progress = lambda _: None,
) -> Repaired:  # fmt: skip
    """progress: called with the bytes just written, from many threads; it may hold them up. expect: with those to come."""
    done, lock = Repaired(), threading.Lock()

    def advance(nbytes: int) -> None:
        with lock:
            done.nbytes += nbytes
        progress(nbytes)

    def gone(file: File, layout: Layout) -> Gone:
        away = [leaving(layout, index, file.head.version) for index in range(len(layout.pieces))]
        return Gone(fragments=parts(layout, lambda index, holder: holder.member in away[index]))

    def nbytes(file: File | None) -> int:
        if file is None or (layout := file.layout) is None:
            return 0
        left = gone(file, layout).applied(layout)
        return sum(share_bytes(p.nbytes, layout.redundancy) * p.fragments.count(None) for p in left.pieces)

    def move(path: str, file: File) -> None:
        if (layout := file.layout) is not None and (leaves := gone(file, layout)):
            number = namespace.ring.number
            made = restore(namespace, path, file.head.version, layout, leaves, advance, avoid)
            replace_layout(namespace, path, file, made, number)
            with lock:
                done.files += 1

    def until_moved(item: tuple[str, File | None]) -> None:
        path, file = item
        while file is not None:
            try:
                return move(path, file)
            except CkptError as error:
                if (now := newest(namespace, path, file)) is file:
                    done.failed[path] = str(error)
                    return None
                file = now  # its writer was here, and took away what was to be moved
        return None

    paths = [path for path, head in namespace.list().items() if head.kind == "file"]
    for start in range(0, len(paths), _BATCH):
        files = namespace.stat_all(paths[start : start + _BATCH])
        expect(sum(map(nbytes, files.values())))
        in_order(until_moved, files.items(), FILES_AT_ONCE, "ckpt-repair")
    return done
