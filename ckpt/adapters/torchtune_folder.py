"""The recipe state that torchtune itself has saved, and from which all ranks continue."""

from __future__ import annotations

from pathlib import Path

from ckpt.errors import FormatError, StepNotFound
from ckpt.groups import Group
from ckpt.loading.rank_agreement import is_true_on_rank_0, run_on_all_ranks
from ckpt.repository.repository import Url, open_repository
from ckpt.storage.base.errors import InvalidArgument
from ckpt.support.path_kinds import is_file

DEFAULT_NAME = "recipe_state/recipe_state.pt"
"""The name of the recipe state in the output folder, if the configuration gives none."""


def continues_from_recipe_state(group: Group, url: Url, file: Path) -> bool:
    """Return whether a recipe continues from the file of torchtune, as rank 0 finds it, because there is no step yet.

    Raises InvalidArgument on all ranks if a rank, such as one on a new host, lacks the file: that rank would begin anew alone.
    """

    def require_file() -> None:
        if not is_file(file):
            raise InvalidArgument(
                f"rank 0 continues from {file.name}, and rank {group.rank} has no {file}: copy it to each host"
            )

    found = is_true_on_rank_0(group, lambda: not _has_steps(url) and is_file(file))
    if found:
        run_on_all_ranks(group, require_file)
    return found


def _has_steps(url: Url) -> bool:
    try:
        return bool(open_repository(url).steps())
    except (StepNotFound, FormatError):
        return False
