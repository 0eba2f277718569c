"""The access to members for reading, writing and rebuilding fragments: open members, health, deadlines, threads."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.cluster.member_health import WARNING_INTERVAL_SECONDS
from ckpt.aggregator.cluster.open_member import OpenMember
from ckpt.aggregator.file_io.scratch_pool import ScratchPool
from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation
from ckpt.aggregator.records.current_members import Membership
from ckpt.aggregator.records.file_record import FileLayout
from ckpt.storage.base.errors import StoreError
from ckpt.storage.base.plural import format_count
from ckpt.storage.base.store import Writer

log = logging.getLogger("ckpt")

T = TypeVar("T")

_DISCARD_SECONDS = 3.0


class MemberIO:
    """The members that store fragments, and the resources for calls to them. Safe to use from many threads."""

    def __init__(self, membership: Membership, commit_timeout_seconds: float) -> None:
        self._membership = membership
        seconds = membership.config.credentials.deadline_seconds
        self.append_timeout_seconds = seconds
        """A member that takes longer for an append has failed for the file."""
        self.commit_timeout_seconds = commit_timeout_seconds
        self.read_timeout_seconds = 2 * seconds
        self.hedge_after_seconds = 0.5
        """A read that takes longer is started on another member too."""
        self.fan_out = membership.fan_out
        self.read_fan_out = FanOut(self.fan_out.health)
        self.scratch = ScratchPool()
        self._warned_at: dict[str, float] = {}
        """The time of the last warning about each subject of `warning_level`. Set without a lock: two threads may both warn."""

    @property
    def url(self) -> str:
        return self._membership.url

    @property
    def open_members(self) -> Mapping[str, OpenMember]:
        """The members of the configuration and of the record ring, by name."""
        return self._membership.open_members

    @property
    def locations(self) -> tuple[MemberLocation, ...]:
        """The members that may get new fragments."""
        return self._membership.locations

    @property
    def host_domain(self) -> tuple[str, ...]:
        """The failure domains of this host."""
        return self._membership.host_domain

    def shared_domains(self, member: str) -> int:
        """Return how many of the widest failure domains a member shares with this host."""
        return self._membership.shared_domains(member)

    def update_domains(self) -> None:
        """Update the failure domains from the reports of the members."""
        self._membership.update_domains()

    def warn_under_replicated(self, path: str, member_count: int, redundancy: Redundancy) -> None:
        """Log that a file is on fewer members than its redundancy needs: at most one warning per minute, else level INFO."""
        log.log(
            self.warning_level("redundancy"),
            "%s of %s is on %s, but %s needs %d: the other members accept no writes; run `ckpt-node admin repair` when they do",
            path,
            self.url,
            format_count(member_count, "member"),
            redundancy,
            redundancy.total_fragments,
        )

    def warning_level(self, subject: str) -> int:
        """Return the level of a message about a subject that concerns each file: at most one WARNING per minute, else INFO."""
        now = time.monotonic()
        if now < self._warned_at.get(subject, -math.inf) + WARNING_INTERVAL_SECONDS:
            return logging.INFO
        self._warned_at[subject] = now
        return logging.WARNING

    # --- objects that no record needs ------------------------------------------------------------------------------

    def discard(self, names: Mapping[str, Sequence[str]], wait_for_slow_nodes: bool = False) -> Collection[str]:
        """Delete objects, given by member, and return the members that have not confirmed it. A scrub finds what stays there.

        Members that are not open are skipped, and are not among those returned.

        wait_for_slow_nodes: wait for nodes as long as for a commit; by default a slow node continues in the background after
        three seconds. Directories and buckets are always waited for.
        """
        open_members = self.open_members
        calls = {m: (lambda m=m, n=n: open_members[m].store.delete(n)) for m, n in names.items() if m in open_members and n}  # type: ignore[misc]
        errors: dict[str, StoreError] = {}
        for batch, seconds in self._discard_batches(calls, wait_for_slow_nodes):
            errors |= self.fan_out.ask(batch, seconds, skip_failed=True, mark_late=False)[1]
        for member, error in errors.items():
            log.info("%d objects stay on %s until the next repair: %s", len(names[member]), member, error)
        return errors.keys()

    def _discard_batches(
        self, by_member: Mapping[str, T], wait_for_slow_nodes: bool = False
    ) -> list[tuple[dict[str, T], float]]:
        """Return the items of nodes and those of other members, each with the seconds to wait for them."""
        awaited = {m for m, each in self.open_members.items() if wait_for_slow_nodes or each.member.address is None}
        nodes = {m: each for m, each in by_member.items() if m not in awaited}
        others = {m: each for m, each in by_member.items() if m not in nodes}
        node_seconds = min(_DISCARD_SECONDS, self.commit_timeout_seconds)
        return [each for each in ((nodes, node_seconds), (others, self.commit_timeout_seconds)) if each[0]]

    def abort(self, writers: Mapping[str, Writer]) -> None:
        """Abort unfinished objects, one of each member; as in `discard`, a slow node continues in the background.

        An unfinished object of a member that does not answer expires there.
        """
        for batch, seconds in self._discard_batches(writers):
            self.fan_out.abort(batch, seconds)

    def discard_layouts(self, layouts: Iterable[FileLayout], kept_objects: Collection[str] = ()) -> None:
        """Delete the objects of layouts except `kept_objects`, with one call of each member."""
        objects_by_member: dict[str, list[str]] = defaultdict(list)
        for member_object in dict.fromkeys(each for layout in layouts for each in layout.objects):
            if member_object.name not in kept_objects:
                objects_by_member[member_object.member].append(member_object.name)
        self.discard(objects_by_member)

    def close(self) -> None:
        """Accept no more reads. The membership closes the members."""
        self.read_fan_out.close()
