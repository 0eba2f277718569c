"""The folder that the Trainer of transformers itself has saved, and from which all ranks continue."""

from __future__ import annotations

import os

from transformers.trainer_utils import get_last_checkpoint

from ckpt.groups import as_group
from ckpt.loading.rank_agreement import broadcast_from_rank_0, run_on_all_ranks
from ckpt.storage.base.errors import InvalidArgument
from ckpt.support.path_kinds import is_folder


def newest_folder_of_trainer(output: str) -> str | None:
    """Return the newest folder that Trainer itself has saved in the output folder, as rank 0 finds it; None if there is none.

    Raises InvalidArgument on all ranks if a rank, such as one on a new host, lacks it: that rank would begin anew alone.
    """
    group = as_group()

    def find() -> str:
        return os.path.basename((get_last_checkpoint(output) if is_folder(output) else None) or "")

    name = broadcast_from_rank_0(group, find)
    folder = os.path.join(output, name)

    def require_folder() -> None:
        if not is_folder(folder):
            raise InvalidArgument(f"rank 0 continues from {name}, and rank {group.rank} has no {folder}: copy it to each host")

    if name:
        run_on_all_ranks(group, require_folder)
    return folder if name else None
