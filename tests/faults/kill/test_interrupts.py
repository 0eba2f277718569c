"""An interrupt right after a command starts ends it with one line and the status of an interrupt, and no file is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.processes import finish, python

from ckpt.recovery.memory_tier import local

IN_THE_AGENT = """
import os, signal, sys
from pathlib import Path
from ckpt.recovery.agent import agent
from ckpt.tools.run import main

folder, part = sys.argv[1:]
agent._shared_memory_folder = lambda: folder
before = getattr(agent, part)

def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return before(*arguments)

setattr(agent, part, interrupted)
sys.argv = ["ckpt-run", "--run-dir", f"{folder}/run", "--", "touch", f"{folder}/began"]
try:
    main()
except SystemExit as ended:
    print(ended.code, *sorted(path.name for path in Path(folder).iterdir()))
"""
COMMANDS = {
    name: entry.partition(":")[0]
    for name, entry in tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["scripts"].items()
}
"""The module of each command."""

SWALLOWED = """
import os, signal
import click
from ckpt.tools import common

class Interrupting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

@click.command(name="ckpt-restore")
@click.argument("words", nargs=-1)
def main(words):
    with common.progress(10, "writing") as advance:
        interrupting = Interrupting()
        del interrupting  # Python prints an exception that is raised in a destructor, and continues
        print("continued", flush=True)
        if words:
            advance(1)
            print("once more", flush=True)

common.run(main)
"""


@pytest.mark.parametrize("arguments", [[], ["more"]], ids=["at the end", "before more progress"])
def test_an_interrupt_that_a_destructor_swallows_still_ends_the_command(tmp_path: Path, arguments: list[str]) -> None:
    program = tmp_path / "ckpt-restore"
    program.write_text(SWALLOWED)
    done = subprocess.run([sys.executable, str(program), *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert done.stdout == "continued\n"
    assert done.stderr.rstrip().endswith("ckpt-restore: interrupted")


def _run_interrupted(folder: Path, module: str, name: str, how: str, *arguments: str) -> None:
    """Run a command that is interrupted when it imports a module; require that it ends with one line.

    how: "script", as pip writes it, or "module", for `python -m`.
    """
    (folder / f"{module}.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.01)\n")
    (folder / name).write_text(f"from {COMMANDS[name]} import main\nmain()\n")
    command = [str(folder / name)] if how == "script" else ["-m", COMMANDS[name]]
    done = subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (128 + signal.SIGINT, f"{name}: interrupted")


@pytest.mark.parametrize("module", ["typing", "click", "sqlite3"])
@pytest.mark.parametrize("how", ["script", "module"])
def test_an_interrupt_during_an_import_ends_the_command(tmp_path: Path, module: str, how: str) -> None:
    """The modules are imported by the package, by the command, and by the code that the command runs."""
    _run_interrupted(tmp_path, module, "ckpt-run", how, "--run-dir", str(tmp_path / "run"), "--", "true")


@pytest.mark.parametrize("how", ["script", "module"])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_during_an_import_ends_each_command(tmp_path: Path, name: str, how: str) -> None:
    _run_interrupted(tmp_path, "click", name, how, "--help")


def test_a_program_that_imports_ckpt_keeps_the_default_interrupt_handler() -> None:
    code = "import ckpt, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert finish(python(code)).strip() == "True"


def test_a_program_named_like_a_command_keeps_the_default_interrupt_handler(tmp_path: Path) -> None:
    program = tmp_path / "ckpt-mytrain.py"
    program.write_text("import ckpt, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("part", ["OrphanGuard", "LogConsole", "Coordinator"])
def test_an_interrupt_while_the_agent_starts_ends_the_run(tmp_path: Path, part: str) -> None:
    """The agent records the interrupt, and the run ends before a rank starts."""
    assert finish(python(IN_THE_AGENT, tmp_path, part)).split() == [str(128 + signal.SIGINT), "run"]
    memory = local.memory_folder(tmp_path / "run")
    assert memory is None or not memory.exists()
