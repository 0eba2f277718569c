"""Ctrl-C in the first moments of a command: one line, the status of an interrupt, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import finish, python

from ckpt.recovery.memory_tier import local

IN_THE_AGENT = """
import os, signal, sys
from pathlib import Path
from ckpt.recovery.agent import agent
from ckpt.tools.run import main

folder, place = sys.argv[1:]
agent._shared_memory_folder = lambda: folder
before = getattr(agent, place)

def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return before(*arguments)

setattr(agent, place, interrupted)
sys.argv = ["ckpt-run", "--run-dir", f"{folder}/run", "--", "touch", f"{folder}/began"]
try:
    main()
except SystemExit as ended:
    print(ended.code, *sorted(path.name for path in Path(folder).iterdir()))
"""
SWALLOWED = """
import os, signal
import click
from ckpt.tools import common

class Going:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

@click.command(name="ckpt-restore")
@click.argument("words", nargs=-1)
def main(words):
    with common.progress(10, "writing") as advance:
        going = Going()
        del going  # Python prints what is raised here, and goes on
        print("gone on", flush=True)
        if words:
            advance(1)
            print("once more", flush=True)

common.run(main)
"""


@pytest.mark.parametrize("piece", [[], ["piece"]], ids=["at the end", "before another piece"])
def test_one_that_came_to_nothing_in_a_callback(tmp_path: Path, piece: list[str]) -> None:
    program = tmp_path / "ckpt-restore"
    program.write_text(SWALLOWED)
    done = subprocess.run([sys.executable, str(program), *piece], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert done.stdout == "gone on\n"
    assert done.stderr.rstrip().endswith("ckpt-restore: interrupted")


@pytest.mark.parametrize("module", ["numpy", "click", "sqlite3"])
@pytest.mark.parametrize("how", ["script", "module"])
def test_while_it_imports(tmp_path: Path, module: str, how: str) -> None:
    """By the package, by the command, and by what the command does."""
    (tmp_path / f"{module}.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.01)\n")
    (tmp_path / "ckpt-run").write_text("from ckpt.tools.run import main\nmain()\n")  # as pip writes it
    command = [str(tmp_path / "ckpt-run")] if how == "script" else ["-m", "ckpt.tools.run"]
    done = subprocess.run(
        [sys.executable, *command, "--run-dir", str(tmp_path / "run"), "--", "true"], capture_output=True, text=True,
        timeout=60, check=False, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (128 + signal.SIGINT, "ckpt-run: interrupted")


def test_a_program_that_imports_ckpt_hears_of_it_as_ever() -> None:
    code = "import ckpt, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert finish(python(code)).strip() == "True"


def test_and_one_whose_name_begins_as_a_command_s(tmp_path: Path) -> None:
    program = tmp_path / "ckpt-mytrain.py"
    program.write_text("import ckpt, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("place", ["OrphanGuard", "LogConsole", "Coordinator"])
def test_while_the_agent_begins(tmp_path: Path, place: str) -> None:
    """It is noted, and the run ends before a rank has begun."""
    assert finish(python(IN_THE_AGENT, tmp_path, place)).split() == [str(128 + signal.SIGINT), "run"]
    found = local.memory_folder(tmp_path / "run")
    assert found is None or not found.exists()
