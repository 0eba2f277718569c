"""Which variables the run log may set in the environment of ranks."""

from __future__ import annotations

import logging

import pytest

from ckpt.recovery.policy.loss_rollback import rollback_environment
from ckpt.recovery.ranks.allowed_variables import ALLOWED_VARIABLES, allowed_environment
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState


def test_variables_that_run_code_are_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    bad = dict.fromkeys(("LD_PRELOAD", "PATH", "PYTHONPATH", "PYTHONSTARTUP", "CKPT_CONFIG"), "/tmp/evil")
    with caplog.at_level(logging.WARNING):
        assert allowed_environment({"CKPT_SKIP_BATCHES": "1", **bad}).keys() <= ALLOWED_VARIABLES
    assert all(name in caplog.text for name in bad)


def test_variables_that_ckpt_run_sets_are_allowed() -> None:
    written = RunState(spec=RunSpec(("true",), 1)).environment | rollback_environment(((1, 2),), 3, 4.0)
    assert written.keys() == ALLOWED_VARIABLES
    assert allowed_environment(written) == written


@pytest.mark.parametrize(
    "given", [None, 3, "LD_PRELOAD=x", ["PATH"], dict.fromkeys(ALLOWED_VARIABLES, 3), dict.fromkeys(ALLOWED_VARIABLES, "a\0b")]
)
def test_a_malformed_environment_sets_no_variable(given: object) -> None:
    assert allowed_environment(given) == {}
