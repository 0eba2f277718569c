"""Moving what a namespace holds: off a member, off one that is taken out for ever, or to where placement wants it today."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ckpt.aggregator.cluster import etcd
from ckpt.aggregator.cluster.fanout import run_in_order
from ckpt.aggregator.file_io.layout_replacement import current_record, replace_layout
from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.file_io.rebuild import ByteProgress, rebuild_fragments
from ckpt.aggregator.maintenance.repair import (
    FILES_AT_ONCE,
    RepairReport,
    repair_namespace,
    select_fragments,
)
from ckpt.aggregator.maintenance.scrub import require_exists, scrub_namespace
from ckpt.aggregator.placement.rendezvous_hash import choose_members
from ckpt.aggregator.records.file_record import FileLayout, PathRecord, fragment_bytes
from ckpt.aggregator.records.ring_change import change_ring
from ckpt.storage.base.errors import CkptError, InvalidArgument

_BATCH = 1_000
_RECHECK_SECONDS = 1.0


def drain_member(namespace: Namespace, member: str, progress: ByteProgress = lambda _: None) -> RepairReport:
    """Move every fragment off a member, to others. Nothing new goes there only once its weight is 0.

    Raises InvalidArgument where the member is read-only: it could delete nothing, and its records would fall behind.
    """
    if member not in namespace.open_members:
        raise InvalidArgument(f"{member} is no member of {namespace.url}; there are {', '.join(namespace.open_members)}")
    answers, _ = namespace.fan_out.ask({member: namespace.open_members[member].info}, namespace.commit_timeout_seconds)
    if member in answers and answers[member].state == "read-only":
        raise InvalidArgument(
            f"{member} is read-only, so that it can't delete what moves away; start it without --read-only and give it the "
            "weight 0, or `ckpt-node admin forget` it, which works as it is"
        )
    return _move_off(namespace, member, progress)


def _move_off(namespace: Namespace, member: str, progress: ByteProgress) -> RepairReport:

    def leaving(layout: FileLayout, index: int, version: str) -> set[str]:
        return {member}

    return _move_fragments(namespace, leaving, {member}, progress)


def remove_member(
    namespace: Namespace, member: str, is_destroyed: bool = False, progress: ByteProgress = lambda _: None
) -> RepairReport:
    """Take a member out for ever: what it holds goes to others, and so do the records that it keeps.

    destroyed: its device never comes back. Must be said where, of two members, the other alone is left to agree to it.
    """
    config = namespace.config
    require_exists(namespace)
    if member not in namespace.ring.all_members and member not in namespace.open_members:
        raise InvalidArgument(f"{member} is no member of {namespace.url}; there are {', '.join(namespace.open_members)}")
    answers, _ = namespace.fan_out.ask({m: p.info for m, p in namespace.open_members.items()}, namespace.commit_timeout_seconds)
    redundancy = config.redundancy
    remaining = [s for s in namespace.locations if s.name != member and s.name in answers]
    if len(remaining) < redundancy.total_fragments:
        raise InvalidArgument(
            f"without {member} {len(remaining)} members answer and {redundancy} needs {redundancy.total_fragments}; start "
            "the others, or another one and name it in the URL, or write with less redundancy"
        )
    change_ring(namespace, remaining, member, is_destroyed)  # from now on no writer gets this member
    done, empty_rounds = RepairReport(), 0
    while member in answers and not is_destroyed and empty_rounds < 2:  # until nothing is left that was under way then
        moved = _move_off(namespace, member, progress)
        done.files, done.nbytes = done.files + moved.files, done.nbytes + moved.nbytes
        if moved.failed:
            return replace(done, failed=moved.failed)
        empty_rounds = 0 if moved.files else empty_rounds + 1
        if empty_rounds:  # a record that was half-done then may come through a moment later; its writer moves it, too
            time.sleep(_RECHECK_SECONDS)
    if config.etcd_url:
        etcd.remove_announcement(*etcd.parse_etcd_url(config.etcd_url), member, access=config.etcd_credentials)
    namespace.drop_member(member)
    rest = repair_namespace(namespace, scrub_namespace(namespace), progress=progress)
    return replace(rest, files=rest.files + done.files, nbytes=rest.nbytes + done.nbytes)


def rebalance_fragments(
    namespace: Namespace, progress: ByteProgress = lambda _: None, on_planned_bytes: ByteProgress = lambda _: None
) -> RepairReport:
    """Move fragments to the members that placement proposes today: to new members, and to those that were away.

    New members keep records from then on, too, and more of them each record if more of them may be lost.
    """
    require_exists(namespace)
    namespace.update_domains(namespace.commit_timeout_seconds, wait_for_all=True)
    every = {s.name: s for s in (*namespace.ring.members, *(m.location for m in namespace.config.members))}
    spots = namespace.with_known_domains(every.values())
    change_ring(namespace, spots, tolerated_losses=namespace.config.redundancy.tolerated_losses)
    namespace.locations = spots

    def leaving(layout: FileLayout, index: int, version: str) -> set[str]:
        piece = layout.stripes[index]
        current_members = {layout.objects[f.object_index].member for f in piece.fragments if f is not None}
        key = f"{version}/{index}"
        return current_members - set(choose_members(key, namespace.locations, len(piece.fragments), namespace.host_domain))

    return _move_fragments(namespace, leaving, set(), progress, on_planned_bytes)


def _move_fragments(
    namespace: Namespace,
    members_to_leave: Callable[[FileLayout, int, str], set[str]],
    excluded: set[str],
    progress: ByteProgress,
    on_planned_bytes: ByteProgress = lambda _: None,
) -> RepairReport:
    """progress: called with the bytes just written, from many threads; it may hold them up. expect: with those to come."""
    done, lock = RepairReport(), threading.Lock()

    def advance(nbytes: int) -> None:
        with lock:
            done.nbytes += nbytes
        progress(nbytes)

    def gone(file: PathRecord, layout: FileLayout) -> LostFragments:
        away = [members_to_leave(layout, index, file.head.version) for index in range(len(layout.stripes))]
        return LostFragments(fragments=select_fragments(layout, lambda index, holder: holder.member in away[index]))

    def nbytes(file: PathRecord | None) -> int:
        if file is None or (layout := file.layout) is None:
            return 0
        remaining = gone(file, layout).removed_from(layout)
        return sum(fragment_bytes(p.nbytes, layout.redundancy) * p.fragments.count(None) for p in remaining.stripes)

    def move(path: str, file: PathRecord) -> None:
        if (layout := file.layout) is not None and (leaves := gone(file, layout)):
            number = namespace.ring.fence_number
            rebuilt = rebuild_fragments(namespace.member_io, path, file.head.version, layout, leaves, advance, excluded)
            replace_layout(namespace, namespace.member_io, path, file, rebuilt, number)
            with lock:
                done.files += 1

    def until_moved(item: tuple[str, PathRecord | None]) -> None:
        path, file = item
        while file is not None:
            try:
                return move(path, file)
            except CkptError as error:
                if (now := current_record(namespace, path, file)) is file:
                    done.failed[path] = str(error)
                    return None
                file = now  # its writer was here, and took away what was to be moved
        return None

    paths = [path for path, head in namespace.list().items() if head.kind == "file"]
    for start in range(0, len(paths), _BATCH):
        files = namespace.stat_all(paths[start : start + _BATCH])
        on_planned_bytes(sum(map(nbytes, files.values())))
        run_in_order(until_moved, files.items(), FILES_AT_ONCE, "ckpt-repair")
    return done
