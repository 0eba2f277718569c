"""What reading, writing and rebuilding fragments need of a namespace: its open members, their health, deadlines and threads."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from ckpt.aggregator.cluster.fanout import FanOut
from ckpt.aggregator.cluster.open_member import OpenMember
from ckpt.aggregator.file_io.scratch_pool import ScratchPool
from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation
from ckpt.aggregator.records.file_record import FileLayout
from ckpt.aggregator.records.membership import Membership
from ckpt.storage.base.errors import StoreError

log = logging.getLogger("ckpt")

_DISCARD_SECONDS = 3.0
_WARNING_INTERVAL_SECONDS = 60.0


class MemberIO:
    """Calls to the members that hold fragments. Safe to use from many threads."""

    def __init__(self, membership: Membership, commit_timeout_seconds: float) -> None:
        self._membership = membership
        seconds = membership.config.credentials.deadline_seconds
        self.append_timeout_seconds = seconds
        """A member that takes longer for an append is passed over."""
        self.commit_timeout_seconds = commit_timeout_seconds
        self.read_timeout_seconds = 2 * seconds
        self.hedge_after_seconds = 0.5
        """A read that takes longer is asked of another member too."""
        self.fan_out = membership.fan_out
        self.read_fan_out = FanOut(self.fan_out.health)
        self.scratch = ScratchPool()
        self._under_replication_warned_at = -math.inf

    @property
    def url(self) -> str:
        return self._membership.url

    @property
    def open_members(self) -> Mapping[str, OpenMember]:
        """By name: those of the configuration and of the ring."""
        return self._membership.open_members

    @property
    def locations(self) -> tuple[MemberLocation, ...]:
        """The members that may take fragments."""
        return self._membership.locations

    @property
    def host_domain(self) -> tuple[str, ...]:
        """The failure domains of this host."""
        return self._membership.host_domain

    def shared_domains(self, member: str) -> int:
        """How many of the widest failure domains a member shares with this host."""
        return self._membership.shared_domains(member)

    def update_domains(self) -> None:
        """Learn the failure domains that members report of themselves."""
        self._membership.update_domains()

    def warn_under_replicated(self, path: str, member_count: int, redundancy: Redundancy) -> None:
        """Log that a file is on fewer members than it should be: a warning once a minute at most, else for information."""
        now = time.monotonic()
        level = logging.WARNING if now >= self._under_replication_warned_at + _WARNING_INTERVAL_SECONDS else logging.INFO
        if level == logging.WARNING:
            self._under_replication_warned_at = now
        log.log(
            level,
            "%s of %s is on %d members where %s asks for %d, as the others take nothing now: `ckpt-node admin repair` "
            "makes it whole when they do, or when there are more",
            path,
            self.url,
            member_count,
            redundancy,
            redundancy.total_fragments,
        )

    # --- objects that no record needs ------------------------------------------------------------------------------

    def discard(self, names: Mapping[str, Sequence[str]], wait_for_slow_nodes: bool = False) -> None:
        """Delete objects by member. What can't be deleted now, a scrub finds.

        wait_for_slow_nodes: else a node that takes long goes on by itself; a member without a node is always waited for.
        """
        open_members = self.open_members
        calls = {m: (lambda m=m, n=n: open_members[m].store.delete(n)) for m, n in names.items() if m in open_members and n}  # type: ignore[misc]
        nodes = {m: call for m, call in calls.items() if open_members[m].member.address is not None and not wait_for_slow_nodes}
        others = {m: call for m, call in calls.items() if m not in nodes}
        errors: dict[str, StoreError] = {}
        for asked, seconds in (
            (nodes, min(_DISCARD_SECONDS, self.commit_timeout_seconds)),
            (others, self.commit_timeout_seconds),
        ):
            errors |= self.fan_out.ask(asked, seconds, skip_failed=True, mark_late=False)[1] if asked else {}
        for member, error in errors.items():
            log.info("%d objects on %s stay until a scrub: %s", len(names[member]), member, error)

    def discard_layout(self, layout: FileLayout, kept_objects: Collection[str] = ()) -> None:
        """Delete the objects of a layout but those to keep."""
        objects_by_member: dict[str, list[str]] = defaultdict(list)
        for holder in layout.objects:
            if holder.name not in kept_objects:
                objects_by_member[holder.member].append(holder.name)
        self.discard(objects_by_member)

    def close(self) -> None:
        """Take no more reads; the membership closes the rest."""
        self.read_fan_out.close()
