"""What the commands share: exit codes, messages, sizes, tables and the progress bar."""

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
from typing import Any, NoReturn

import click
from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ckpt.storage.base.errors import CkptError
from ckpt.support import interrupts

Advance = Callable[[int], None]
"""Called with the number of bytes just done, from any thread."""

_PIPE_CLOSED = 128 + signal.SIGPIPE
_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


class Number(click.FloatRange):
    """A number for an option: nothing compares with `nan`, so it is refused; `inf` is taken where it means "never"."""

    def __init__(self, least: float, *, min_open: bool = False, never: bool = False) -> None:
        super().__init__(least, min_open=min_open)
        self._never = never

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self._never):
            self.fail(f"{value} is no number that can be used here.", param, ctx)
        return number


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes for an option: a number, or one with a unit, such as 500GB or 2TB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).upper().removesuffix("B")
        unit = text[-1:] if text[-1:] in _SIZE_UNITS else ""
        try:
            number = float(text.removesuffix(unit)) * _SIZE_UNITS[unit]
        except ValueError:
            self.fail(f"{value!r} is no size: write 500GB or 2TB", param, ctx)
        if not 1 <= number < 1 << 63:
            self.fail(f"{value!r} is no size: write 500GB or 2TB", param, ctx)
        return int(number)


def key_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option of commands that read steps."""
    return click.option(
        "--key-file", metavar="FILE",
        help="Require that steps are signed with a key of this file. Default: that of the environment (CKPT_KEY_FILE), else "
        "no signature is checked.",
    )(command)  # fmt: skip


def run(command: click.Command) -> NoReturn:
    """Run a command and end the process: 0 fine, 1 an error of ours, 2 wrong usage, 130 and 143 interrupted."""
    name = command.name or "ckpt"
    try:
        interrupts.as_exceptions()
        # By default SIGTERM ends the process on the spot and would leave temporary files.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if not sys.warnoptions:  # of the libraries below: nothing that a user of a command could act on
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
        print_error(name, "not enough memory; name fewer leaves with --only, or choose a format that is written in pieces")
        sys.exit(1)


def print_error(name: str, message: str) -> None:
    """One line on stderr."""
    click.echo(f"{name}: {printable(' '.join(message.split()))}", err=True)


def emit(text: str) -> None:
    """Print to stdout; where the reader has gone (`| head`), end quietly as a process killed by SIGPIPE would."""
    try:
        click.echo(text)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains
        sys.exit(_PIPE_CLOSED)


def emit_json(value: Any) -> None:
    """Print a JSON document to stdout."""
    emit(json.dumps(value, indent=2))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; columns that are named with a leading `>` are set to the right. Only last cells may have colours.

    Set here rather than by rich, which takes 8 s for a step of 20,000 leaves and cuts numbers to fit a narrow terminal.
    """
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
def progress(total: int | None, label: str) -> Iterator[Advance]:
    """A bar on stderr that counts bytes, where that is a terminal (or FORCE_COLOR says so). total: None where nobody knows."""
    with growing_progress(label, total) as (_, advance):
        yield advance


@contextmanager
def growing_progress(label: str, total: int | None = 0) -> Iterator[tuple[Advance, Advance]]:
    """Such a bar, whose total grows: what adds to that, and what advances it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _check_interrupts, _check_interrupts
        return
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
    """Bytes for people: 1.2 GB."""
    return decimal(round(nbytes)).replace(" bytes", " B")


def printable(name: str) -> str:
    """A name from a file without control characters, which could drive the terminal."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def require_plot(png: Path) -> None:
    """Before the work: whether a picture can be drawn into this file."""
    import_optional("matplotlib", "--png", "report")
    if not png.parent.is_dir():
        raise CkptError(f"--png {png}: there is no folder {png.parent}; make it, or name another file")


def import_optional(module: str, what: str, extra: str) -> Any:
    """Import a package that is not a core dependency; say how to get it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CkptError(
            f"{what} needs the package {module}, which cannot be imported ({error}); pip install 'ckpt-store[{extra}]'"
        ) from error
