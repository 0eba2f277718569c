"""ckpt-run that a rank of another ckpt-run starts, such as one that evaluates or fine-tunes a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DECIDED = {"CKPT_SKIP": "16-17", "CKPT_BEFORE": "16", "CKPT_SPIKE_LIMIT": "2.5", "CKPT_MTBF": "1.0"}
"""What the outer run has decided for its own ranks."""


@pytest.mark.parametrize("outer", [{"CKPT_AGENT": "outer"}, {}], ids=["in a rank", "by hand"])
def test_the_ranks_of_an_inner_run_follow_no_decision_of_the_outer_one(tmp_path: Path, outer: dict[str, str]) -> None:
    """Variables that a user sets by hand, outside of any run, are passed on as all others."""
    command = [sys.executable, "-m", "ckpt.tools.run", "--cold", "--run-dir", str(tmp_path / "run"), "--", sys.executable, "-c"]
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    environment = os.environ | DECIDED | outer
    done = subprocess.run([*command, program], capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["CKPT_AGENT"] != "outer"
    assert found["CKPT_MTBF"] != DECIDED["CKPT_MTBF"]
    decided = {name: found.get(name) for name in DECIDED if name != "CKPT_MTBF"}
    assert decided == {name: None if outer else DECIDED[name] for name in decided}
