"""A writer is stopped between its check of the lease and its commit record, and another takes the repository over.

In every order, each step is whole, the steps of the new writer stay, and a save that did not commit reports no success.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.nodes import three_nodes
from helpers.processes import SOAK
from helpers.repositories import assert_clean
from helpers.states import assert_same
from programs.takeover_server import Server, state, variant_of

import ckpt

pytest_plugins = ["helpers.moto_server"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="detects stopped processes by /proc")

OLD, NEW = 1, 2
"""Variants of the state of a step; variant 0 was saved before the test."""


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory, s3_endpoint: str) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("answers")
    servers = Server(folder), Server(folder)
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(params=["local", "s3", "ckpt"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run")
    elif request.param == "s3":
        yield f"{request.getfixturevalue('bucket')}/run"
    else:
        with three_nodes(tmp_path) as nodes:
            yield f"ckpt://{nodes}/run"


def variant_of_steps(url: str) -> dict[int, int]:
    """Return the variant of each step. Fail where a step is not whole."""
    variants = {}
    for step in ckpt.open(url).steps():
        assert ckpt.open(url)[step].verify() > 0
        number, variant = variant_of(ckpt.load(url, step=step))
        assert number == step
        assert_same(ckpt.load(url, step=step), state(step, variant))
        variants[step] = variant
    return variants


LEASE_ONLY: list[list[int]] = []
OTHER = [[9, NEW]]
SAME = [[1, NEW], [9, NEW]]


@pytest.mark.parametrize(
    ("replaces", "lease_checks", "saves"),
    [
        pytest.param(False, 1, OTHER, id="new, confirmed, another step is saved"),
        pytest.param(False, 1, SAME, id="new, confirmed, the same step is saved"),
        pytest.param(False, 2, LEASE_ONLY, id="new, committed, only the lease is taken"),
        pytest.param(False, 2, SAME, id="new, committed, the same step is saved"),
        pytest.param(True, 2, SAME, id="replacing, before it is confirmed, the same step is saved"),
        pytest.param(True, 3, OTHER, id="replacing, confirmed, another step is saved"),
        pytest.param(True, 3, SAME, id="replacing, confirmed, the same step is saved"),
    ],
)
def test_a_writer_that_wakes_after_a_takeover_changes_no_step(
    writers: tuple[Server, Server], url: str, replaces: bool, lease_checks: int, saves: list[list[int]]
) -> None:
    old, new = writers
    before = [[0, 0], [1, 0]] if replaces else [[0, 0]]
    old.begin(url=url, role="old", saves=[*before, [1, OLD]], stop_after=lease_checks)
    assert old.stands_still()
    committed = variant_of_steps(url).get(1) == OLD
    assert new.run(url=url, role="new", saves=saves) == "saved"
    steps_before = variant_of_steps(url)
    old.wake()
    outcome = old.result()
    variants = variant_of_steps(url)
    if outcome == "saved":
        assert committed or variants[1] == OLD
    else:
        assert outcome.startswith(("Fenced: ", "AlreadyExists: ")), outcome
        assert "taken over" in outcome or "newer job" in outcome
    for step, variant in saves:
        assert variants[step] == variant == steps_before[step], "a step of the new writer has changed"
    assert new.run(url=url, role="new", saves=[[10, NEW]]) == "saved"  # this save sweeps temporary files, too
    assert variant_of_steps(url) == variants | {10: NEW}
    if "://" not in url:
        assert_clean(url, folders=False)


@pytest.mark.soak
@pytest.mark.parametrize("replaces", [False, True])
def test_a_writer_stopped_at_any_file_system_call_is_fenced(
    writers: tuple[Server, Server], tmp_path: Path, rng: random.Random, replaces: bool
) -> None:
    """Its files may be gone when it wakes. The error names the takeover, not a missing file."""
    old, new = writers
    calls = range(1, 75) if SOAK else sorted(rng.sample(range(1, 75), 10))
    for call in calls:
        url = str(tmp_path / f"run-{call}")
        saves = [[0, 0], [1, 0], [1, OLD]] if replaces else [[0, 0], [1, OLD]]
        old.begin(url=url, role="old", saves=saves, stop_at_call=call)
        if not old.stands_still():
            assert old.result() == "saved"
            continue
        committed = variant_of_steps(url).get(1) == OLD
        assert new.run(url=url, role="new", saves=SAME) == "saved"
        old.wake()
        if (outcome := old.result()) == "saved":
            assert committed, f"call {call}"
        else:
            assert outcome.startswith(("Fenced: ", "AlreadyExists: ")), f"call {call}: {outcome}"
        assert variant_of_steps(url)[1] == NEW


def test_a_writer_killed_in_its_commit_leaves_no_visible_step(writers: tuple[Server, Server], url: str) -> None:
    """The next writer that saves the step replaces its prepared commit."""
    old, new = writers
    old.begin(url=url, role="old", saves=[[0, 0], [1, OLD]], stop_after=1)
    assert old.stands_still()
    os.kill(old.pid, signal.SIGKILL)
    with pytest.raises(AssertionError):
        old.result()
    assert variant_of_steps(url) == {0: 0}
    assert new.run(url=url, role="new", saves=[[2, NEW]]) == "saved"
    assert variant_of_steps(url) == {0: 0, 2: NEW}
    assert new.run(url=url, role="new", saves=[[1, NEW]]) == "saved"
    assert variant_of_steps(url) == {0: 0, 1: NEW, 2: NEW}
