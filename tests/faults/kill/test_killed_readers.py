"""A rank is killed while the ranks of its host share what they read."""

from __future__ import annotations

import gc
import os
import platform
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.forked_ranks import outcomes_of_ranks
from helpers.rank_threads import all_well, on_ranks
from helpers.shared_windows import mappings, saved, window_of

from ckpt.groups.threads import ThreadGroup

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64"),
    reason="no shared memory window on this system",
)


PROGRAM = """
import os, sys, time
import numpy as np
import torch.distributed as dist
import ckpt
from ckpt.storage.base.failpoints import set_failpoints

dist.init_process_group("gloo")
rank = dist.get_rank()
names = ckpt.open(sys.argv[1])[0].leaves()
like = {leaf.name: np.zeros(leaf.shape, leaf.dtype) for leaf in names}
if rank == int(sys.argv[2]):
    set_failpoints(sys.argv[3])
begun = time.monotonic()
try:
    ckpt.load(sys.argv[1], like)
except ckpt.CkptError as error:
    print(f"{type(error).__name__} {time.monotonic() - begun:.0f} {error}", flush=True)
    os._exit(3)
print("loaded", sum(float(a.sum()) for a in like.values()), flush=True)
dist.destroy_process_group()
"""


def run_three_ranks(root: Path, victim: int, point: str) -> list[tuple[int, str]]:
    """Return exit status and output of three ranks under gloo, of which one has an active fail point."""
    pytest.importorskip("torch")
    program = root.parent / "program.py"
    program.write_text(PROGRAM)
    return [(done.returncode, done.stdout) for done in outcomes_of_ranks(3, program, str(root), str(victim), point)]


@pytest.mark.parametrize("victim", [0, 2])
def test_the_other_ranks_name_a_rank_that_was_killed_during_a_shared_read(tmp_path: Path, victim: int) -> None:
    """The other ranks see it in the shared memory itself, and report which rank died. Rank 0 has created the memory."""
    root = tmp_path / "repository"
    state = saved(root)
    ended = run_three_ranks(root, victim, "load.window=kill@2")
    assert ended[victim][0] == -9
    for rank, (status, output) in enumerate(ended):
        if rank != victim:
            assert status == 3, (rank, status, output)
            assert output.startswith("GroupError"), output
            assert re.search(rf"ranks? ([0-9, ]*, )?{victim}(, [0-9, ]*)? died", output), output  # or one that ended with it
    total = sum(float(array.sum()) for array in state.values())
    for status, output in run_three_ranks(root, 0, ""):
        assert status == 0
        assert np.isclose(float(output.split()[1]), total)


def test_a_shared_window_is_unmapped_with_its_last_reference() -> None:
    gc.collect()  # a traceback of an earlier failure may reference a window
    before = mappings()
    windows = all_well(on_ranks(3, lambda g: window_of(g, 2, 1), ThreadGroup.make(3)))
    windows[0].wait_for_free_slot(0)[:] = 7
    windows[0].mark_ready(0)
    for window in windows:
        window.wait_until_ready(0, reader=0)
        assert (window.slot(0) == 7).all()
    assert mappings() == before + 3
    del windows, window
    assert mappings() == before
