"""Open the repositories of all tiers, and refuse tiers that do not work together."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.format.signature import Keys
from ckpt.groups.base import Group
from ckpt.repository.repository import Repository, Url, open_repository
from ckpt.repository.retention import Keep, as_keep
from ckpt.storage.base.errors import InvalidArgument
from ckpt.tiers.tier_spec import Tier, is_host_memory, tier_location


def open_repositories(url: Url, keep: int | Keep | None, tiers: Sequence[Tier], keys: Keys) -> list[Repository]:
    """Return the repositories of the tiers, the nearest first, and the repository of record at the end.

    Raises InvalidArgument if two of them have the same URL, or if `Keep(copies=…)` is given.
    """
    main_repo = open_repository(url, keys)
    repos = [*(open_repository(tier_location(tier, main_repo.url), keys) for tier in tiers), main_repo]
    if any(kept is not None and kept.copies > 1 for kept in map(as_keep, (keep, *(tier.keep for tier in tiers)))):
        raise InvalidArgument(
            "ckpt.Keep(copies=…) with tiers: a save does not know which steps will be copied to a tier, so that all of "
            "those may refer to the same copy; leave copies= out, or the tiers"
        )
    if len({repo.url for repo in repos}) < len(repos):
        raise InvalidArgument(f"tiers and {main_repo.url}: two of them have the same URL; give each another one")
    return repos


def require_shared_memory(tiers: Sequence[Tier], group: Group) -> None:
    """Raise InvalidArgument if a tier is the memory of one host, and the ranks are on several."""
    if group.size > 1 and any(map(is_host_memory, tiers)) and not group.one_host():
        raise InvalidArgument(
            'Tier("memory"): the ranks are on several hosts; start them with ckpt-run and the options that it asks for, '
            "or give the nodes of the hosts: "
            'Tier("ckpt://host1:7070,host2:7070/run?redundancy=2x")'
        )
