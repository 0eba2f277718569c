"""The memory of a host that leaves a run is freed only if no step in it can be needed."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from helpers.host_runs import starts
from helpers.memory_runs import InMemory
from helpers.memory_runs import job as job


@pytest.mark.parametrize("columns", [2000, 4], ids=["objects", "records"])
def test_a_spare_that_leaves_keeps_steps_that_the_log_does_not_name(
    job: Callable[..., InMemory], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """They are of a run whose log was lost. Small steps are in records, and larger ones in objects."""
    monkeypatch.setenv("CKPT_TEST_COLUMNS", str(columns))
    run = job(hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    for name in "ab":
        agent = run.agents.pop(name)
        agent.kill()
        agent.wait()
    kept = (path for path in run.files("a") if "objects" in path.parts or path.name == "registers.sqlite")
    old_steps = {path for path in kept if path.name[0] != "."}  # not the temporary files of the killed node
    assert old_steps
    run.lose_log()
    for name in "cd":
        run.start(name)
    run.until_step(6)
    run.start("a")
    run.until(lambda _: "the log of the run does not name these nodes" in run.messages("a"), "found the old steps")
    run.agents["a"].send_signal(signal.SIGTERM)
    run.agents["a"].wait(timeout=600)
    assert run.agents["a"].returncode == 128 + signal.SIGTERM, run.messages("a")
    assert old_steps <= {*run.files("a")}, run.messages("a")
    assert sorted(starts(run.log())[-1]) == ["c", "d"]
