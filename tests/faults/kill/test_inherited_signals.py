"""The tests of interrupts pass whatever signal settings pytest itself was started with."""

from __future__ import annotations

import signal
import subprocess
import sys

from helpers.folders import TESTS


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
