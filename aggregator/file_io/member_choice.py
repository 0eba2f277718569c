"""The choice of the members that get the fragments of a file that is being written; it leaves out those that fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation, choose_members
from ckpt.storage.base.errors import NoSpace, Refused, StoreError, Unavailable
from ckpt.storage.base.plural import format_count

log = logging.getLogger("ckpt")


class MemberChoice:
    """The members for the fragments of one file. Safe to use from many threads.

    version: that of the file, from which the preferred members follow.
    """

    def __init__(self, member_io: MemberIO, path: str, version: str, redundancy: Redundancy) -> None:
        self._member_io = member_io
        self._path = path
        self._version = version
        self._redundancy = redundancy
        self._lock = threading.Lock()
        """Guards changes of `_failed_members`."""
        self._failed_members: dict[str, StoreError] = {}

    @property
    def has_failures(self) -> bool:
        """Whether a member has failed for this file."""
        return bool(self._failed_members)

    def choose(self, index: int, count: int, excluded: Sequence[str]) -> list[str]:
        """Return the members for `count` fragments of a stripe, or fewer, but at least as many as a write needs.

        excluded: members that have other fragments of the stripe. Raises Unavailable or NoSpace if too few members are left.
        """
        host_domain, key = self._member_io.host_domain, f"{self._version}/{index}"
        min_members = self._redundancy.min_write_fragments - len(excluded)
        # Also if one of the excluded members is down or has failed now, no other member of its failure domain should be chosen.
        taken = [m for m in self._member_io.locations if m.name in excluded]
        for candidates in (self.responsive_candidates(), self._candidates()):
            found = choose_members(key, [*{*taken, *candidates}], count, host_domain, excluded)
            if len(found) >= min_members:
                return found
        raise self.too_few_error()

    def _candidates(self) -> list[MemberLocation]:
        """Return the members that accept new fragments and have not failed for this file."""
        return [m for m in self._member_io.locations if m.weight > 0 and m.name not in self._failed_members]

    def responsive_candidates(self) -> list[MemberLocation]:
        """Return the candidates that are not down."""
        return [m for m in self._candidates() if not self._member_io.fan_out.health.is_down(m.name)]

    def too_few_error(self) -> StoreError:
        """Return the error of a write that finds too few members, with the errors of those that failed."""
        with self._lock:  # other appends may note failed members meanwhile
            failed = dict(self._failed_members)
        is_full = any(isinstance(error, NoSpace) for error in failed.values())
        reasons = "".join(f"; {name}: {error}" for name, error in failed.items())
        return (NoSpace if is_full else Unavailable)(
            f"{self._path} needs {format_count(self._redundancy.min_write_fragments, 'member')} for {self._redundancy}, "
            f"{len(self._candidates())} of {len(self._member_io.locations)} accept writes{reasons}; start or add members, or "
            "write with less redundancy"
        )

    def mark_failed(self, member: str, error: StoreError) -> None:
        """Give a member no more fragments of this file. error: why; it is logged once."""
        with self._lock:
            is_first = member not in self._failed_members
            self._failed_members.setdefault(member, error)
        if is_first:
            # A read-only member refuses every file.
            level = self._member_io.warning_level(f"refusals of {member}") if isinstance(error, Refused) else logging.WARNING
            log.log(level, "%s of %s is written without %s: %s", self._path, self._member_io.url, member, error)
