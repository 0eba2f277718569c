"""Signal settings that the parent of a process has left: of the tests of interrupts, and of ckpt-run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from helpers.faulty_runs import RUN
from helpers.folders import TESTS
from helpers.processes import until


def set_signals_of_a_background_job() -> None:
    """Set the signals of this process as a shell without job control and nohup do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def test_tests_of_interrupts_pass_in_a_background_job() -> None:
    cases = [
        "faults/kill/test_interrupts.py::test_a_program_that_imports_ckpt_keeps_the_default_interrupt_handler",
        "faults/races/test_background_errors.py::test_an_interrupt_during_a_save_leaves_a_whole_step_or_none",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / case) for case in cases)],
        cwd=TESTS.parent, preexec_fn=set_signals_of_a_background_job, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def ignore_ends_of_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def test_the_status_of_a_rank_is_known_although_the_parent_ignored_ends_of_children(tmp_path: Path) -> None:
    for script, status, words in (("true", 0, ""), ("exit 7", 1, "rank 0 exited with status 7 ")):
        command = [*RUN, "--run-dir", str(tmp_path), "--restarts", "0", "--", "sh", "-c", script]
        done = subprocess.run(
            command, preexec_fn=ignore_ends_of_children, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == status, done.stderr
        assert words in done.stderr


def test_a_signal_that_the_parent_had_blocked_ends_a_run(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = [*RUN, "--run-dir", str(tmp_path / "run"), "--", "sh", "-c", f"touch {ready}; exec sleep 3000"]
    with subprocess.Popen(command, preexec_fn=set_signals_of_a_background_job) as agent:
        until(ready.exists)
        agent.terminate()
        try:
            assert agent.wait(300) == 128 + signal.SIGTERM
        finally:
            agent.kill()
