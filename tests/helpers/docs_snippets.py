"""Runs the blocks of a page of the documentation, in order and in one folder, and compares what they print with the page.

The first line of a block determines how it is used:

    ```console                      each line that begins with `$ ` is typed into one shell; the other lines are its output
    ```python title="train.py"      the block is written to that file; so are toml, yaml and text blocks with a title
    ```diff title="train.py"        the change is made to that file
    ```python                       runs in one Python process for the page
    ```text                         what the Python block before it prints

A comment above a block changes this:

    <!-- varies: REGULAR EXPRESSION -->    a match differs from run to run, and is not compared; it has no `.*`
    <!-- not run: REASON -->               the block is shown and not run
    <!-- needs: FRAMEWORK -->              the block is run only by `make test-framework-FRAMEWORK`

In output, `…` stands for any text, and a line of it for any lines. Times, durations, ports, the folder and the host name
are masked everywhere.
`PYTHONPATH=tests python -m helpers.docs_snippets PAGE…` runs pages and writes the printed output into them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from helpers.docs_pages import (
    _ENDED,
    _FILES,
    _LISTENS,
    _SECONDS,
    HOME,
    HOST,
    ROOT,
    Block,
    _Output,
    blocks,
    changed,
    commands,
    masked,
    matches,
)

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""For pages with killed programs, which must have printed what they print at a terminal. Lines of several programs may mix."""
INSTALLED = {
    "PIP_NO_DEPS": "1", "PYTHONPATH": sysconfig.get_path("purelib"), "PIP_DISABLE_PIP_VERSION_CHECK": "1", **UNBUFFERED,
}  # fmt: skip
"""Variables for pages that install ckpt: its new environment uses the packages of the environment that runs this."""


@dataclass
class Runner:
    """Runs pages in a folder, one after another, in one shell and one Python process. A context manager that ends both."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    framework: str | None = None
    """The framework whose blocks are run, too."""

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_", "PYTEST", "COLUMNS"))}
        self._environ = environ | {"PATH": path, "HOME": str(self.folder)} | self.environment
        self._ports: dict[str, str] = {}
        self._background = ""
        self._stack = ExitStack()
        self._bash = self._start(["bash", "--norc", "-s"])
        self._python: subprocess.Popen[bytes] | None = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder,
            env=self._environ, start_new_session=True,
        )  # fmt: skip
        self._stack.callback(_kill_session, process)
        return process

    def run(self, page: Path) -> Iterator[_Output]:
        """Run each block of a page; yield the outputs of blocks that print something, or should."""
        pending: Block | None = None
        printed = ""
        for block in [*blocks(page), None]:
            if pending is not None:  # a Python block: the next block shows its output
                shown = block.text if block is not None and block.kind == "text" and block.title is None else ""
                yield _Output(block if shown and block is not None else pending, shown, printed)
                pending, printed = None, ""
                if shown:
                    continue
            if block is None or block.not_run is not None or block.framework not in (None, self.framework):
                continue
            if block.kind == "console":
                yield from self._console(block)
            elif block.kind == "diff" and block.title is not None:
                self._change(block)
            elif block.title is not None and block.kind in _FILES:
                (self._cwd() / block.title).write_text(self._to_this_run(block.text))
            elif block.kind == "python":
                pending, printed = block, self._code(block)

    # --- the shell -----------------------------------------------------------------------------------------------

    def _console(self, block: Block) -> Iterator[_Output]:
        for command, shown in commands(block.text):
            printed, status = self._type(command, block)
            if status and "echo $?" not in block.text and "Killed" not in shown:
                raise AssertionError(f"{block.where}: `{command}` ended with {status}:\n{printed}")
            yield _Output(block, shown, self._to_page(printed))

    def _type(self, command: str, block: Block) -> tuple[str, int]:
        mark = f"<<{os.urandom(8).hex()}>>"
        typed = f'{self._to_this_run(command)}\n__ckpt_status=$?; echo "{mark}$__ckpt_status"; (exit $__ckpt_status)\n'
        assert self._bash.stdin is not None
        self._bash.stdin.write(typed.encode())
        self._bash.stdin.flush()
        printed, _, rest = self._until(self._bash, mark, block).rpartition(mark)
        if re.search(r"&( |$)", typed, re.MULTILINE):
            self._background += typed
        return _ENDED.sub(self._killed_notice, printed), int(rest.partition("\n")[0])

    def _killed_notice(self, notice: re.Match[str]) -> str:
        """Return the notice of a killed command as a terminal shows it; a background command has none, as its time varies."""
        return "" if notice[2].strip() in self._background else f"{notice[1]}\n"

    def _cwd(self) -> Path:
        return Path(os.readlink(f"/proc/{self._bash.pid}/cwd"))

    def _until(self, process: subprocess.Popen[bytes], mark: str, block: Block) -> str:
        """Return what a process prints up to the line with the mark."""
        assert process.stdout is not None
        printed = b""
        deadline = time.monotonic() + _SECONDS
        os.set_blocking(process.stdout.fileno(), False)
        while not re.search(re.escape(mark).encode() + rb"\d+\n", printed):
            if (more := process.stdout.read()) is not None:
                if not more:
                    raise AssertionError(f"{block.where}: the process has ended:\n{printed.decode()}")
                printed += more
            if time.monotonic() > deadline:
                raise AssertionError(f"{block.where}: not done after {_SECONDS} s:\n{printed.decode()}")
            time.sleep(0.01)
        return printed.decode().rstrip("\n")

    # --- Python ----------------------------------------------------------------------------------------------------

    def _code(self, block: Block) -> str:
        if self._python is None or self._cwd() != self._python_cwd:
            self._python_cwd = self._cwd()
            self._python = self._start([sys.executable, "-c", _SESSION])
        mark = f"<<{os.urandom(8).hex()}>>"
        assert self._python.stdin is not None
        line = json.dumps([self._to_this_run(block.text), str(self._python_cwd), mark, block.where, block.line])
        self._python.stdin.write(line.encode() + b"\n")
        self._python.stdin.flush()
        printed, _, failed = self._until(self._python, mark, block).rpartition(mark)
        assert failed == "0", f"{block.where} fails:\n{printed}"
        return self._to_page(printed)

    def _change(self, block: Block) -> None:
        assert block.title is not None
        file = self._cwd() / block.title
        file.write_text(changed(file.read_text(), self._to_this_run(block.text), block.where))

    # --- ports and folders -----------------------------------------------------------------------------------------

    def _to_this_run(self, text: str) -> str:
        """Return a text of a page with the folder of this run and free ports."""
        return _LISTENS.sub(lambda found: self._port(found[0]), text).replace(HOME, str(self.folder))

    def _port(self, shown: str) -> str:
        if shown not in self._ports:
            self._ports |= _free_ports(shown)
        return self._ports[shown]

    def _to_page(self, text: str) -> str:
        """Return an output with the folder, the ports and the host name of the pages."""
        for shown, port in self._ports.items():
            text = re.sub(rf"\b{port}\b", shown, text)
        return re.sub(rf"\b{re.escape(socket.gethostname())}\b", HOST, text.replace(str(self.folder), HOME))


_SESSION = """
import contextlib, json, linecache, os, sys, traceback
there = {"__name__": "__main__"}
for line in sys.stdin:
    source, folder, mark, where, first = json.loads(line)
    os.chdir(folder)
    failed = 0
    try:
        exec(compile("\\n" * (first - 1) + source, where, "exec"), there)
    except BaseException:
        failed = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    print(mark + str(failed), flush=True)
"""


def _free_ports(shown: str) -> dict[str, str]:
    """Return a free port for a port of a page, and with it one for its metrics, 1000 above.

    They have four digits, as those of the pages, so that the columns of tables are as wide as the pages show them.
    """
    number = int(shown)
    if 8000 <= number < 9000:
        return {shown: _free_ports(str(number - 1000))[shown]} if number >= 8070 else {}
    for port in range(2_000 + os.getpid() % 4_000, 8_900, 7):
        if _is_free(port) and _is_free(port + 1000):
            return {shown: str(port), str(number + 1000): str(port + 1000)}
    raise AssertionError("no port is free")


_handed_out: set[int] = set()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    if port in _handed_out:
        return False
    _handed_out.add(port)
    return True


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes of its session."""
    for each in sorted(_session_pids(process.pid), reverse=True):
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                pass


def _session_pids(session: int) -> Iterator[int]:
    """Yield the processes of a session."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                yield int(stat.parent.name)
        except (OSError, IndexError):
            continue


def differences(runner: Runner, pages: Iterable[Path]) -> list[str]:
    """Run pages; return the shown and the printed output wherever they differ."""
    found = []
    for page in pages:
        for output in runner.run(page):
            expected = masked(output.shown, output.block.varies)
            actual = masked(output.printed, output.block.varies)
            if not matches(expected, actual):
                found.append(f"{output.block.where} shows\n{output.shown.strip()}\nand prints\n{output.printed.strip()}")
    return found


def rewrite(runner: Runner, page: Path) -> None:
    """Run a page and write the printed output into it. A `…` in the shown output stays only while the whole still matches."""
    text = page.read_text().splitlines()
    shift = 0
    outputs: dict[int, list[_Output]] = {}
    order: list[Block] = []
    for output in runner.run(page):
        if output.block.line not in outputs:
            order.append(output.block)
        outputs.setdefault(output.block.line, []).append(output)
    for block in order:
        old = block.text.splitlines()
        new: list[str] = []
        if block.kind == "console":
            for (command, _), output in zip(commands(block.text), outputs[block.line], strict=True):
                first, *others = command.split("\n")
                new += [f"$ {first}", *(f"> {line}" for line in others), *_kept(output)]
        elif block.kind == "text":
            new = _kept(outputs[block.line][0])
        else:  # a Python block that prints, without a block that shows it
            (output,) = outputs[block.line]
            if output.printed.strip():
                new = [*old, "```", "", "```text", *output.printed.strip().splitlines()]
            else:
                continue
        begin = block.line - 1 + shift
        assert text[begin : begin + len(old)] == old, block.where
        text[begin : begin + len(old)] = new
        shift += len(new) - len(old)
    page.write_text("\n".join(text) + "\n")


def _kept(output: _Output) -> list[str]:
    """Return the lines of the shown output if it matches, else those of the printed one."""
    if matches(masked(output.shown, output.block.varies), masked(output.printed, output.block.varies)):
        return output.shown.splitlines()
    return [line.rstrip() for line in output.printed.strip().splitlines()]


def checkout(to: Path) -> None:
    """Copy the repository as a new clone has it."""
    leave = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "out")
    shutil.copytree(ROOT, to, ignore=leave)


def main() -> None:
    """Rewrite pages. Those of the tutorial continue each other, and begin with a checkout; others are independent."""
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    tutorial = [page for page in pages if page.parent.name == "tutorial"]
    groups = [tutorial, *([page] for page in pages if page not in tutorial)]
    for group in filter(None, groups):
        with tempfile.TemporaryDirectory(prefix="ckpt-docs-") as folder:
            home = Path(folder) / "me"
            framework = os.environ.get("CKPT_TEST_FRAMEWORK")
            with Runner(home, INSTALLED if group is tutorial else {}, framework) as runner:
                if group is tutorial:
                    checkout(home / "ckpt")
                for page in group:
                    rewrite(runner, page)


if __name__ == "__main__":
    main()
