"""The program on the page about MindSpore runs, and resumes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from helpers.folders import REPOSITORY

import ckpt


def test_the_program_of_the_page_resumes(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/howto/mindspore.md").read_text()
    found = re.search(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    assert found is not None
    killed = found[1].replace(
        "        ck.step(step, state)\n", "        ck.step(step, state)\n        assert step < 15 or start > 0\n"
    )
    assert killed != found[1]
    for program, status in ((killed, 1), (killed, 0)):
        (tmp_path / "train.py").write_text(program)
        done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == status, done.stderr
    assert 29 in [saved.step for saved in ckpt.open(tmp_path / "run")]
