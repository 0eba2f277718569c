"""A warning where this process looks like one of many but would save alone."""

from __future__ import annotations

from ckpt.groups import Group, as_group
from ckpt.groups.launchers import signs_of_other_ranks
from ckpt.support.user_warning import warn_user

_MAX_SIGNS = 4
_has_warned = False
"""No lock: two threads may both warn."""


def group_that_saves(group: object) -> Group:
    """Return the group of a `group=` option. Warns once where "auto" finds one process, but the environment shows others."""
    global _has_warned
    found = as_group(group)
    if isinstance(group, str) and found.size == 1 and not _has_warned and (signs := signs_of_other_ranks()):
        _has_warned = True
        warn_user(
            f"this process looks like one of many ({', '.join(signs[:_MAX_SIGNS])}), but saves alone: initialise the library "
            "of the ranks before the save, set RANK and WORLD_SIZE, or give group= (None to save alone)"
        )
    return found
