"""The memory of a host that leaves a run, or returns after its end, is freed only if no step in it can be needed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from helpers.host_runs import PROGRAM, RUN, STEP_SECONDS, starts
from helpers.memory_runs import InMemory, memories_of
from helpers.memory_runs import job as job
from helpers.processes import until


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


def test_hosts_that_return_after_the_end_keep_newer_steps_than_the_drained_ones(
    job: Callable[..., InMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts of an attempt were silent, so others began anew, and got less far."""
    monkeypatch.setenv("CKPT_TEST_EVERY", "1000")
    run = job(hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(60)
    for name in "cd":
        run.start(name)
    until(lambda: {"c", "d"} <= run.run_log.reports().keys(), "c and d are spares")
    for name in "ab":
        run.agents[name].kill()
    until(lambda: [path for path in run.folder.glob("at-[1-9]*-1") if int(path.read_text() or -1) >= 4], "c and d train")
    for name in "cd":
        run.agents[name].send_signal(signal.SIGTERM)
    assert set(run.ends("c", "d").values()) == {128 + signal.SIGTERM}
    log = run.log()
    attempt = len(starts(log))
    assert run.saved()[-1] < 60, "the other hosts got further"
    assert log[-1].facts["memory"] == memories_of(log)[0]
    assert "may be in the memory of a, b, which does not answer" in run.messages("c") + run.messages("d")
    run.assert_memory_is_released("c", "d")
    for name in "ab":
        run.start(name)
    run.until(lambda log: len(starts(log)) > attempt, "begun again")
    until(lambda: len([*run.folder.glob(f"from-{attempt}-*")]) == 2, "restored")
    assert run.first_step(attempt) > 50


def test_one_host_alone_does_not_pass_over_steps_in_its_memory(job: Callable[..., InMemory]) -> None:
    """A run on one host serves no nodes, so it would continue from an older step in the repository, or begin anew."""
    run = job(hosts=2, steps=10_000)
    for name in "ab":
        run.start(name)
    run.until_step(6)
    run.kill("a", "b")
    alone = [*RUN, "-n", "1", "--run-dir", str(run.folder / "run"), "--name", "a", "--address", "127.0.0.1", "--"]
    same = [*alone, sys.executable, PROGRAM, str(run.folder), str(run.steps), str(STEP_SECONDS)]
    done = subprocess.run(same, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, "start with --nnodes 2 --min 1" in done.stderr) == (1, True), done.stderr
    assert len(starts(run.log())) == 1
    run.lose_log()
    lost = subprocess.run([*alone, "true"], capture_output=True, text=True, timeout=600, check=False)
    assert (lost.returncode, "the log of the run is empty" in lost.stderr) == (1, True), lost.stderr
