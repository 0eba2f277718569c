"""Which rank counts as a straggler, and which does not."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.agent_worlds import world
from helpers.host_runs import job as job
from helpers.step_times import measured_pace, pace, slow_down, straggler_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.recovery.coordinator.transitions import draft_next_entries
from ckpt.recovery.policy.stragglers import PaceMeter, find_stragglers
from ckpt.recovery.run_log.agent_reports import HostFailure
from ckpt.training import cuda_timer, heartbeat_marks, heartbeat_page
from ckpt.training.heartbeat_page import HeartbeatPage
from ckpt.training.heartbeat_records import RankHeartbeat


@given(st.floats(0.01, 100.0), st.integers(1, 20), st.floats(1.2, 8.0), st.floats(1.05, 3.0), st.randoms())
def test_one_slow_rank_among_many_is_found(base: float, others: int, factor: float, more: float, rng: random.Random) -> None:
    """This holds at any speed of the job. The other ranks differ by less than the factor."""
    quick = [pace(rank, base * rng.uniform(1.0, 0.99 * min(factor, 1.5))) for rank in range(others)]
    slow_rank = pace(others, base * min(factor, 1.5) * factor * more)
    assert find_stragglers(quick, factor) == []
    assert [each.rank for each in find_stragglers([*quick, slow_rank], factor)] == [others]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(0, 2**32), st.integers(2, 8), st.sampled_from(["even", "two", "rare", "heavy"]))
def test_jitter_of_steps_makes_no_straggler(seed: int, ranks: int, kind: str) -> None:
    """The lengths of steps vary by a factor of ten and more, for each rank by itself."""
    rng = random.Random(seed)
    draw: Callable[[], float] = {
        "even": lambda: rng.uniform(0.1, 1.0), "two": lambda: rng.choice([0.1, 1.0]),
        "rare": lambda: 1.0 if rng.random() < 0.1 else 0.1, "heavy": lambda: min(20.0, 0.1 * rng.paretovariate(1.2)),
    }[kind]  # fmt: skip
    assert straggler_ranks(*([draw() for _ in range(300)] for _ in range(ranks))) == []


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 200), st.floats(1.0, 30.0), st.integers(1, 6))
def test_a_pause_makes_no_straggler(at: int, seconds: float, count: int) -> None:
    """A rank stops now and then, or is slow for less time than the measurement covers."""
    steps = [0.1] * 400
    for pause in range(count):
        steps[(at + 60 * pause) % 400] = seconds
    assert straggler_ranks(steps, *[[0.1] * 400] * 3) == []
    assert straggler_ranks([0.1] * 340 + [0.4] * 15, *[[0.1] * 400] * 3) == []


@settings(deadline=None, max_examples=10)
@given(st.floats(1.0, 10.0))
def test_a_slowdown_of_all_ranks_makes_no_straggler(factor: float) -> None:
    assert straggler_ranks(*[[0.1] * 200 + [0.1 * factor] * 200] * 4) == []


def test_half_of_the_ranks_may_be_stragglers_but_few_steps_prove_nothing() -> None:
    slow_down, quick = [0.5] * 400, [0.1] * 400
    assert straggler_ranks(slow_down, quick) == [0]
    assert straggler_ranks(slow_down, quick, slow_down, quick) == [0, 2]
    assert straggler_ranks(slow_down, slow_down, slow_down, quick) == [], "one rank is quick; the others are normal"
    assert straggler_ranks(slow_down) == []
    assert measured_pace([0.1] * 50) is None, "five of the ten seconds that are needed"
    assert measured_pace([20.0] * 31) is None, "fewer steps than are needed"
    assert measured_pace([20.0] * 32) is not None


def test_marked_computation_shows_the_straggler_of_a_synchronous_job() -> None:
    together = [0.5] * 400
    assert straggler_ranks(together, together, together) == [], "they end together: step times show no difference"
    few, much = [0.1] * 400, [0.4] * 400
    assert straggler_ranks((together, few), (together, much), (together, few)) == [1]
    assert straggler_ranks((together, few), (together, much), (together, few), [9.0] * 400) == [1], (
        "then only marked times count"
    )
    tiny, more = [0.001] * 400, [0.01] * 400
    assert straggler_ranks((together, tiny), (together, more), (together, tiny)) == [], "the difference is too small"


def test_time_between_steps_does_not_count_as_pace() -> None:
    """A save between two steps does not lengthen the measured step."""
    measure, at = PaceMeter(0, 1.0), 0.0
    beat = RankHeartbeat(1, 0, "step", 0.0, -1, 0.0, 1)
    measure.learn(replace(beat, phase="start"), beat)
    for step in range(1, 100):
        at += 0.1
        before, beat = beat, replace(beat, step=step, since=at)
        measure.learn(before, beat)
        for phase in ("save", "step"):
            at += 5.0 if phase == "step" else 0.0
            before, beat = beat, replace(beat, phase=phase, since=at)
            measure.learn(before, beat)
    pace = measure.pace
    assert pace is not None
    assert pace.seconds == pytest.approx(0.1)


def test_marked_computation_is_counted_in_the_heartbeat_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = HeartbeatPage(tmp_path / "page", new=True)
    monkeypatch.setenv(heartbeat_page.PAGE_VARIABLE, str(tmp_path / "page"))
    heartbeat_page.reset_after_fork()
    try:
        for _ in range(2):
            with heartbeat_marks.compute():
                time.sleep(0.01)
        with pytest.raises(ValueError, match="a bad batch"), heartbeat_marks.compute():
            raise ValueError("a bad batch")
    finally:
        heartbeat_page._after_fork()
    assert page.read().compute_seconds >= 0.02
    page.close()


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no CUDA device")
def test_marked_computation_on_a_device_is_counted_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the device counts, and the mark does not wait for the device."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    page = HeartbeatPage(tmp_path / "page", new=True)
    monkeypatch.setenv(heartbeat_page.PAGE_VARIABLE, str(tmp_path / "page"))
    heartbeat_page.reset_after_fork()
    monkeypatch.setattr(cuda_timer, "_pending", deque())  # without the work that other tests have marked
    try:
        x = torch.randn(4096, 4096, device="cuda")

        def work(times: int) -> None:
            for _ in range(times):
                x @ x

        before, began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        work(10)
        before.record()
        work(300)  # like a collective before the marked computation
        began.record()
        with heartbeat_marks.compute():
            work(100)
        ended.record()
        assert not ended.query(), "the mark does not wait for the device"
        torch.cuda.synchronize()
        assert page.read().compute_seconds == 0
        with heartbeat_marks.compute():
            pass
    finally:
        heartbeat_page._after_fork()
    real = began.elapsed_time(ended) / 1e3
    assert 0.5 * real < page.read().compute_seconds < 1.5 * real, before.elapsed_time(began)
    page.close()


def test_a_straggler_is_reported_once_an_attempt() -> None:
    run = world()
    run.advance()
    slow_down(run, "b")
    for _ in range(3):
        run.advance()
    (note,) = [e for e in run.log if e.kind == "note"]
    assert (note.facts["straggler"], note.facts["host"]) == (3, "b")
    assert note.text == (
        "rank 3 on b takes 3.0 times as long as the median (300 ms instead of 100 ms a step) for 60 s or longer; "
        "--straggler 2 starts the job again without it, where a spare waits"
    )
    assert run.run_state.last is not None
    assert run.run_state.last.kind == "start", "the job continues"


def test_a_spare_replaces_a_straggler_once() -> None:
    """All ranks save and continue without it. If the spare is slow, too, only the first slow host waits, and it stays."""
    run = world(agents=4, straggler=2.0)
    run.advance()
    slow_down(run, "b")
    run.advance()
    assert [e.kind for e in run.log[-3:]] == ["note", "note", "stop"]
    assert run.log[-2].text == "b is left out, as rank 3 there is slow, and d waits"
    while len(run.starts()) < 2:
        run.clock += 0.1
        run.advance()
    assert [m["name"] for m in run.starts()[-1].facts["members"]] == ["a", "d", "c"]
    (failure,) = [e for e in run.log if e.kind == "failure"]
    assert (failure.facts["cause"], failure.facts["host"]) == ("straggler", "b")
    assert run.run_state.budget.restarts_left == run.spec.restarts, "it was not a failure"
    slow_down(run, "d")
    for _ in range(5):
        run.clock += 100.0
        run.advance()
    assert len(run.starts()) == 2
    assert "b" in run.agents, "it waits"
    assert run.log[-1].text.endswith("; no host waits that could replace it")


@pytest.mark.parametrize("case", ["no wish", "no spare", "the spare leaves", "one host"])
def test_no_host_is_left_out_without_a_spare_or_the_option(case: str) -> None:
    run = world(
        hosts=1 if case == "one host" else 3, least=1, agents={"no spare": 3, "one host": 1}.get(case, 4),
        straggler=0.0 if case == "no wish" else 2.0,
    )  # fmt: skip
    run.advance()
    if case == "the spare leaves":
        run.agents["d"] = replace(run.agents["d"], leaving=15)
    slow_down(run, "a")
    for _ in range(3):
        run.advance()
    (entry,) = [e for e in run.log if e.kind in ("note", "stop")]
    assert entry.kind == "note"
    assert entry.text.endswith("; no host waits that could replace it") == (case in ("no spare", "the spare leaves"))


def test_a_rank_that_dies_while_all_save_for_a_straggler_is_the_failure() -> None:
    """That failure counts: its host is at fault, and the straggler is not left out."""
    run = world(agents=4, straggler=2.0)
    run.advance()
    slow_down(run, "b")
    run.append(len(run.log), draft_next_entries(run.view()))
    run.agents["c"] = replace(run.agents["c"], uses_ckpt=True, wrong=HostFailure("signal", (5,), "was killed by SIGKILL"))
    run.advance()
    (failure,) = [e for e in run.log if e.kind == "failure"]
    assert (failure.facts["cause"], failure.facts["host"]) == ("signal", "c")


def test_missing_spares_are_reported_once() -> None:
    run = world(agents=5, spares=2, patience_seconds=30.0)
    run.advance()

    def notes() -> list[str]:
        run.clock += 31.0
        run.advance()
        return [e.text for e in run.log if e.kind == "note"]

    assert notes() == []
    gone = run.agents.pop("e")
    few = "1 of 2 spare hosts wait; start the same command on more"
    assert notes() == [few]
    assert notes() == [few], "once"
    run.agents["e"] = gone
    assert notes() == [few, "2 of 2 spare hosts wait; no more are needed"]
