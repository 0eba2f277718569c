"""Processes of Paddle with a sharded model are killed, and continue with equal losses, bit for bit, also in another number."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.paddle_ranks import run_ranks


@pytest.mark.essential
def test_every_loss_after_the_kill_is_equal(tmp_path: Path) -> None:
    program = PROGRAMS / "paddle_ranks.py"
    status, quiet = run_ranks(program, 2, tmp_path, "quiet", "quiet", 2)
    assert status == {0}
    assert len(set(quiet[0].values()) | set(quiet[1].values())) == 18
    status, before = run_ranks(program, 2, tmp_path, "repo", "before", 2, 5)
    assert status == {-signal.SIGKILL}
    status, after = run_ranks(program, 2, tmp_path, "repo", "after", 2)
    assert status == {0}
    for rank in range(2):
        assert 0 < min(after[rank]) <= 6
        assert before[rank] | after[rank] == quiet[rank]


GROUP_SHARDED = PROGRAMS / "paddle_group_sharded.py"


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return the losses of one process that is not killed, which any number of ranks has, too."""
    status, losses = run_ranks(GROUP_SHARDED, 1, tmp_path_factory.mktemp("quiet"), "repo", "quiet", "none")
    assert status == {0}
    assert len(set(losses[0].values())) == 9
    return losses[0]


@pytest.mark.parametrize(
    "parts",
    [
        [(2, "p_g_os"), (4, "p_g_os"), (1, "none")],
        [(2, "os_g"), (2, "p_g_os"), (4, "os_g")],
        [(1, "none"), (2, "p_g_os"), (1, "none")],
    ],
    ids=lambda parts: " ".join(f"{size}:{level}" for size, level in parts),
)
def test_levels_of_group_sharded_parallel(parts: list[tuple[int, str]], quiet: dict[int, str], tmp_path: Path) -> None:
    """A training run is killed twice, and continues with another number of ranks and at another level."""
    found: dict[int, str] = {}
    for number, ((size, level), kill) in enumerate(zip(parts, (3, 6, None), strict=True)):
        fault = [] if kill is None else [kill]
        status, losses = run_ranks(GROUP_SHARDED, size, tmp_path, "repo", f"part{number}", level, *fault)
        assert status == {0 if kill is None else -signal.SIGKILL}
        assert all(one == losses[0] for one in losses)
        assert min(losses[0]) == (0, 4, 6)[number]
        found |= losses[0]
    assert found == quiet
