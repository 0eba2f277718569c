"""A writer stands still between its look at the lease and its commit record, and is succeeded meanwhile.

Whatever the order: every step is whole, what the successor committed stays, and a save that was not committed is no success.
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
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sees by /proc that a process stands still")

OLD, NEW = 1, 2
"""Variants of the state of a step; 0 is what was saved before."""


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory, s3_endpoint: str) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("answers")
    found = Server(folder), Server(folder)
    yield found
    for server in found:
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


def found(url: str) -> dict[int, int]:
    """The variant of each step. Fails where one is not whole."""
    variants = {}
    for step in ckpt.open(url).steps():
        assert ckpt.open(url)[step].verify() > 0
        number, variant = variant_of(ckpt.load(url, step=step))
        assert number == step
        assert_same(ckpt.load(url, step=step), state(step, variant))
        variants[step] = variant
    return variants


CLAIMS: list[list[int]] = []
OTHER = [[9, NEW]]
SAME = [[1, NEW], [9, NEW]]


@pytest.mark.parametrize(
    ("replaces", "looks", "saves"),
    [
        pytest.param(False, 1, OTHER, id="new, confirmed, another step is saved"),
        pytest.param(False, 1, SAME, id="new, confirmed, the same step is saved"),
        pytest.param(False, 2, CLAIMS, id="new, committed, only claimed"),
        pytest.param(False, 2, SAME, id="new, committed, the same step is saved"),
        pytest.param(True, 2, SAME, id="replacing, before it is confirmed, the same step is saved"),
        pytest.param(True, 3, OTHER, id="replacing, confirmed, another step is saved"),
        pytest.param(True, 3, SAME, id="replacing, confirmed, the same step is saved"),
    ],
)
def test_an_old_writer_wakes_after_it_was_succeeded(
    writers: tuple[Server, Server], url: str, replaces: bool, looks: int, saves: list[list[int]]
) -> None:
    old, new = writers
    before = [[0, 0], [1, 0]] if replaces else [[0, 0]]
    old.begin(url=url, role="old", saves=[*before, [1, OLD]], stop_after=looks)
    assert old.stands_still()
    committed = found(url).get(1) == OLD
    assert new.run(url=url, role="new", saves=saves) == "saved"
    there = found(url)
    old.wake()
    said = old.result()
    variants = found(url)
    if said == "saved":
        assert committed or variants[1] == OLD
    else:
        assert said.startswith(("Fenced: ", "AlreadyExists: ")), said
        assert "taken over" in said or "newer job" in said
    for step, variant in saves:
        assert variants[step] == variant == there[step], "what the successor has committed"
    assert new.run(url=url, role="new", saves=[[10, NEW]]) == "saved"  # which sweeps
    assert found(url) == variants | {10: NEW}
    if "://" not in url:
        assert_clean(url, folders=False)


@pytest.mark.soak
@pytest.mark.parametrize("replaces", [False, True])
def test_an_old_writer_stops_before_any_call_to_the_file_system(
    writers: tuple[Server, Server], tmp_path: Path, rng: random.Random, replaces: bool
) -> None:
    """Its files may be gone when it wakes. It is told that it was succeeded, and not which file is missing."""
    old, new = writers
    calls = range(1, 75) if SOAK else sorted(rng.sample(range(1, 75), 10))
    for call in calls:
        url = str(tmp_path / f"run-{call}")
        saves = [[0, 0], [1, 0], [1, OLD]] if replaces else [[0, 0], [1, OLD]]
        old.begin(url=url, role="old", saves=saves, stop_at_call=call)
        if not old.stands_still():
            assert old.result() == "saved"
            continue
        committed = found(url).get(1) == OLD
        assert new.run(url=url, role="new", saves=SAME) == "saved"
        old.wake()
        if (said := old.result()) == "saved":
            assert committed, f"call {call}"
        else:
            assert said.startswith(("Fenced: ", "AlreadyExists: ")), f"call {call}: {said}"
        assert found(url)[1] == NEW


def test_an_old_writer_that_is_killed_in_its_commit_leaves_nothing_visible(writers: tuple[Server, Server], url: str) -> None:
    """What it has prepared is taken over by who saves the step next."""
    old, new = writers
    old.begin(url=url, role="old", saves=[[0, 0], [1, OLD]], stop_after=1)
    assert old.stands_still()
    os.kill(old.pid, signal.SIGKILL)
    with pytest.raises(AssertionError):
        old.result()
    assert found(url) == {0: 0}
    assert new.run(url=url, role="new", saves=[[2, NEW]]) == "saved"
    assert found(url) == {0: 0, 2: NEW}
    assert new.run(url=url, role="new", saves=[[1, NEW]]) == "saved"
    assert found(url) == {0: 0, 1: NEW, 2: NEW}
