"""Shared parts of the commands: exit codes, messages, option types, tables and the progress bar."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import click

from ckpt.storage.base.errors import CkptError, InvalidArgument
from ckpt.storage.base.store import ByteProgress
from ckpt.support import interrupts

_PIPE_CLOSED = 128 + signal.SIGPIPE
"""The exit status of a process that SIGPIPE kills."""
LONGEST_WAIT_SECONDS = 1e9
"""The most seconds of an option that a thread waits. Threads can't wait for `inf`, nor for more than 292 years."""
_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


class Number(click.FloatRange):
    """The type of an option with a number. It refuses `nan`, which is neither above nor below a limit."""

    def __init__(self, least: float, most: float | None = None, *, min_open: bool = False, never: bool = False) -> None:
        """never: whether `inf` is allowed, which means "never"."""
        super().__init__(least, most, min_open=min_open)
        self._never = never

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self._never):
            self.fail(f"{value} can't be used here; give a finite number.", param, ctx)
        return number


class Size(click.ParamType):  # type: ignore[type-arg]
    """The type of an option with a number of bytes, which may have a unit, such as 500GB or 2TB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).upper().removesuffix("B")
        unit = text[-1:] if text[-1:] in _SIZE_UNITS else ""
        try:
            number = float(text.removesuffix(unit)) * _SIZE_UNITS[unit]
        except ValueError:
            self.fail(f"{value!r} is not a size: write a number such as 500GB or 2TB", param, ctx)
        if not 1 <= number < 1 << 63:
            self.fail(f"{value!r} is not a size: write a number such as 500GB or 2TB", param, ctx)
        return int(number)


C = TypeVar("C", bound=Callable[..., Any])


def key_option(command: C) -> C:
    """Add the option --key-file to a command that reads steps."""
    return click.option(
        "--key-file", metavar="FILE",
        help="Require that steps are signed with a key in this file. Default: the file in CKPT_KEY_FILE; without it, no "
        "signature is checked.",
    )(command)  # fmt: skip


def run(command: click.Command) -> NoReturn:
    """Run a command and end the process: status 0 for success, 1 for an error, 2 for wrong usage, 130 or 143 if interrupted."""
    name = command.name or "ckpt"
    _open_standard_streams()
    try:
        interrupts.as_exceptions()
        # By default SIGTERM ends the process at once, and temporary files would stay.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if not sys.warnoptions:  # users of a command can't act on warnings of the libraries
            warnings.simplefilter("ignore")
        status = command.main(prog_name=name, standalone_mode=False)
        interrupts.check()
        sys.exit(status)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        print_error(name, "interrupted")
        sys.exit(interrupts.STATUS)
    except (CkptError, OSError) as error:
        print_error(name, str(error))
        sys.exit(1)
    except MemoryError:
        print_error(name, "not enough memory; choose fewer leaves with --only, or a format that is written in pieces")
        sys.exit(1)


def _open_standard_streams() -> None:
    """Open /dev/null in place of each standard stream that the parent has closed.

    Otherwise the next file that is opened gets its number, and output is written into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number


def print_error(name: str, message: str) -> None:
    """Print a message in one line to stderr."""
    click.echo(f"{name}: {printable(' '.join(message.split()))}", err=True)


def emit(text: str) -> None:
    """Print to stdout, with escapes for characters that its encoding lacks.

    If the reader has ended (`| head`), end without a message, as a process that SIGPIPE kills.
    """
    try:
        try:
            click.echo(text)
        except UnicodeEncodeError:  # also a byte of a path that is not UTF-8, which Python has as a surrogate
            encoding = sys.stdout.encoding
            click.echo(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit prints an error
        sys.exit(_PIPE_CLOSED)


def emit_json(value: object) -> None:
    """Print a JSON document to stdout."""
    emit(json.dumps(value, indent=2))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. Columns whose names begin with `>` are aligned right. Only the last cell of a row may have colours.

    Not by rich, which takes 8 s for a step with 20,000 leaves, and shortens numbers in a narrow terminal.
    """
    from rich.cells import cell_len

    header = [column.lstrip(">") for column in columns]
    lines = [header, *rows]
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = []
        for column, cell, width in zip(columns, cells, widths, strict=True):
            space = " " * (width - cell_len(cell))
            padded.append(space + cell if column.startswith(">") else cell + space)
        return "  ".join(padded).rstrip()

    emit("\n".join([click.style(line(header), bold=True), *map(line, lines[1:])]))


@contextmanager
def progress(total: int | None, label: str) -> Iterator[ByteProgress]:
    """A context that shows a progress bar of bytes on stderr, if that is a terminal. Yields what advances it.

    total: the bytes in all; None if unknown.
    """
    with growing_progress(label, total) as (_, advance):
        yield advance


@contextmanager
def growing_progress(label: str, total: int | None = 0) -> Iterator[tuple[ByteProgress, ByteProgress]]:
    """A context that shows a progress bar whose total grows. Yields what adds to the total, and what advances the bar."""
    from rich.console import Console  # not at the top: rich takes longer to import than most commands to run

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _check_interrupts, _check_interrupts
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        expected = total or 0

        def expect(nbytes: int) -> None:
            nonlocal expected
            expected += nbytes
            bar.update(task, total=expected)

        def advance(nbytes: int) -> None:
            interrupts.check()
            bar.advance(task, nbytes)

        yield expect, advance


def _check_interrupts(_: int) -> None:
    interrupts.check()


def format_size(nbytes: float) -> str:
    """Return bytes in a readable unit: 1.2 GB."""
    from rich.filesize import decimal

    return decimal(round(nbytes)).replace(" bytes", " B")


def printable(name: str) -> str:
    """Return a text from a file with its control characters escaped, because they could control the terminal."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """A context that turns an InvalidArgument about options alone into a UsageError, which ends with status 2."""
    try:
        yield
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error


def require_plot(png: Path) -> None:
    """Raise CkptError if no plot can be written to this file. Call it before the work."""
    import_optional("matplotlib", "--png", "report")
    require_parent_folder(png)


def require_parent_folder(path: Path) -> None:
    """Raise CkptError if there is no folder for a file or folder that should be written at `path`."""
    if path.parent.is_dir():
        return
    if path.parent.exists():
        raise CkptError(f"{path} cannot be written: {path.parent} is not a folder; name a file in a folder")
    raise CkptError(f"{path} cannot be written: the folder {path.parent} does not exist; create it first")


def import_optional(module: str, what: str, extra: str) -> ModuleType:
    """Return a module of an optional dependency; raise CkptError with the command that installs it if it is missing.

    what: the feature that needs it. extra: the extra of ckpt-store that includes it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CkptError(
            f"{what} needs the package {module}, which cannot be imported ({error}); pip install 'ckpt-store[{extra}]'"
        ) from error
