"""Coverage-guided inputs for each parser of bytes that others write: no foreign error, and no more memory than a limit.

`tests/programs/fuzz_parser.py` lists the parsers. An input that fails is printed; that program repeats it from a folder.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.campaigns import CountCases
from helpers.processes import SOAK, python_path

PROGRAM = Path(__file__).parents[2] / "programs/fuzz_parser.py"
RUNS = 1_000_000 if SOAK else 10_000

pytestmark = pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is built for Linux on x86-64 only")


def parsers() -> list[str]:
    """Return the names of all parsers, without an import of the program, which instruments what it imports."""
    for node in ast.parse(PROGRAM.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PARSERS":
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("the program has no PARSERS")


def fuzz(parser: str, folder: Path, runs: int, *options: str) -> subprocess.CompletedProcess[str]:
    corpus = folder / "corpus"
    corpus.mkdir()
    # A fixed seed repeats the inputs. The long campaign draws one (seed 0), which libFuzzer prints.
    seed = 0 if SOAK else 1
    env = {**os.environ, "PYTHONPATH": python_path()}
    limits = [f"-runs={runs}", "-max_len=4096", "-rss_limit_mb=2048", f"-seed={seed}"]
    # libFuzzer reads the peak of memory from getrusage(2), which begins with that of the parent: a shell here, not pytest.
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    command = [*shell, sys.executable, str(PROGRAM), parser, str(corpus), *limits, *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, errors="replace", check=False)


@pytest.mark.soak
@pytest.mark.parametrize("parser", parsers() if SOAK else ["all"])
def test_a_parser_raises_only_its_own_errors(parser: str, tmp_path: Path, count_cases: CountCases) -> None:
    done = fuzz(parser, tmp_path, RUNS)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert f"Done {RUNS} runs" in done.stderr
    count_cases(RUNS)


@pytest.mark.soak
def test_a_foreign_error_is_found(tmp_path: Path) -> None:
    done = fuzz("ballot", tmp_path, 100_000, "--no-errors")
    assert done.returncode != 0
    assert "ValueError" in done.stderr + done.stdout
