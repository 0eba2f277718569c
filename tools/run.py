"""ckpt-run: keeps a training job running."""

from __future__ import annotations

import datetime
import os
import signal
import sys
from pathlib import Path

import click

from ckpt.storage.errors import CkptError
from ckpt.tools import common
from ckpt.tools.common import emit
from ckpt.tools.simulate import command as simulate

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_DEFAULT = "ckpt-run-files"

_folder = click.option(
    "--run-dir", type=click.Path(path_type=Path), default=_DEFAULT, show_default=True,
    help="Where the run keeps its record and logs.",
)


@click.command("ckpt-run", context_settings=_SETTINGS | {"ignore_unknown_options": False})
@click.option("-n", "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes on this host.")
@_folder
@click.option(
    "--restarts", type=click.IntRange(0), default=10, show_default=True, help="Restarts in a row without a newer step.",
)
@click.option(
    "--grace", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds to save in, after SIGTERM.",
)
@click.option(
    "--hang", type=click.FloatRange(1), default=10.0, show_default=True, help="Least seconds of silence that are a hang.",
)
@click.option(
    "--first-hang", type=click.FloatRange(1), default=900.0, show_default=True, help="As long as nothing is learned.",
)
@click.option("--show", type=click.Choice(["0", "all", "none"]), default="0", show_default=True, help="Whose output to show.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    ranks: int, run_dir: Path, restarts: int, grace: float, hang: float, first_hang: float, show: str, command: tuple[str, ...]
) -> int:
    """Run COMMAND as so many ranks, and start them again from what they saved when one of them fails.

    \b
      ckpt-run -n 4 -- python train.py --lr 1e-4
      ckpt-run why                   what was decided, and why
      ckpt-run report                where the time went

    A rank is told who it is as by torchrun (RANK, WORLD_SIZE, MASTER_ADDR …). A rank that uses ckpt.Checkpointer is
    noticed when it hangs, too, and is asked to save before the job ends. Exit status: 0 all ranks ended well, 1 the job was
    given up, 128 + n it was ended by signal n.
    """
    from ckpt.recovery.coordinator import Coordinator, Job
    from ckpt.recovery.limits import FIRST_SECONDS, Limits

    first = {phase: min(seconds, first_hang) for phase, seconds in FIRST_SECONDS.items()}
    job = Job(command, ranks, run_dir, grace, restarts, Limits(least_seconds=hang, first_seconds=first), show)
    return Coordinator(job, lambda text: common.complain("ckpt-run", text)).run()


@click.command("ckpt-run why", context_settings=_SETTINGS)
@_folder
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document a line.")
def why(run_dir: Path, as_json: bool) -> int:
    """Print what was decided, and why."""
    from ckpt.recovery.record import as_json as lines

    for entry in _entries(run_dir):
        if as_json:
            emit(lines(entry))
        elif entry.kind in ("start", "decision", "end"):
            at = datetime.datetime.fromtimestamp(entry.at).strftime("%H:%M:%S")
            what = f"{entry.facts['action']}: " if entry.kind == "decision" else ""
            emit(f"{at}  attempt {entry.attempt}  {entry.kind}  {what}{common.printable(entry.text)}")
    return 0


@click.command("ckpt-run status", context_settings=_SETTINGS)
@_folder
def status(run_dir: Path) -> int:
    """Show what the ranks of a run do now. Exit status: 0 it runs, 1 it does not."""
    from ckpt.pulse import Pulse

    entries = _entries(run_dir)
    start = next(entry for entry in reversed(entries) if entry.kind == "start")
    pages = Path(start.facts["pages"])
    if not _runs(entries):
        emit(f"it does not run: {entries[-1].text}")
        return 1
    import time

    rows = []
    for number in range(int(start.facts["ranks"])):
        beat = Pulse(pages / f"{start.attempt}-{number}").read()
        silent = f"{time.monotonic() - beat.since:.1f} s"
        rows.append((str(number), str(beat.pid or "?"), beat.phase, _step(beat.step), _step(beat.committed), silent))
    common.show_table((">rank", ">process", "phase", ">step", ">committed", ">silent for"), rows)
    emit(f"attempt {start.attempt}; logs in {start.facts['logs']}")
    return 0


@click.command("ckpt-run inject", context_settings=_SETTINGS)
@click.argument("fault", type=click.Choice(["kill", "stop", "term", "abort"]))
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True)
@_folder
def inject(fault: str, rank: int, run_dir: Path) -> int:
    """Do something bad to a rank, to see what happens: kill it, stop it, end it, let it dump core."""
    from ckpt.pulse import Pulse

    start = next(entry for entry in reversed(_entries(run_dir)) if entry.kind == "start")
    page = Path(start.facts["pages"]) / f"{start.attempt}-{rank}"
    if not page.exists():
        raise CkptError(f"there is no rank {rank} now: see `ckpt-run status --run-dir {run_dir}`")
    pid = Pulse(page).read().pid
    if not pid:
        raise CkptError(f"rank {rank} has not opened a Checkpointer yet, so its process is not known")
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "abort": signal.SIGABRT}[fault]
    os.kill(pid, number)
    emit(f"{number.name} was sent to rank {rank}, process {pid}")
    return 0


@click.command("ckpt-run report", context_settings=_SETTINGS)
@_folder
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--prometheus", is_flag=True, help="Print it in Prometheus' text format.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw it into this file.")
def report(run_dir: Path, as_json: bool, prometheus: bool, png: Path | None) -> int:
    """Print where the time of a run went, or draw it."""
    from ckpt.recovery.ledger import NAMES, goodput, lines, totals

    entries, seconds = _entries(run_dir), totals(run_dir)
    failures = sum(entry.kind == "failure" for entry in entries)
    total = sum(seconds.values())
    if png is not None:
        common.optional("matplotlib", "--png", "report")
        from ckpt.recovery.picture import draw_run

        draw_run(lines(run_dir), entries, png)
    if prometheus:
        from ckpt.recovery.metrics import text

        emit(text(entries, seconds, _runs(entries)).rstrip())
    elif as_json:
        common.emit_json({"seconds": dict(seconds), "failures": failures, "goodput": goodput(seconds)})
    else:
        spent = [(name, seconds.get(name, 0.0)) for name in NAMES]
        rows = [(name, f"{part:.2f} s", f"{100 * part / (total or 1.0):.1f} %") for name, part in spent]
        common.show_table(("", ">seconds", ">share"), rows)
        emit(f"{total:.2f} s in all; {common.count(failures, 'failure')}")
    return 0


def _runs(entries: list) -> bool:  # type: ignore[type-arg]
    """Whether the run of this record is under way: it has not ended, nor been killed."""
    from ckpt.recovery import host

    facts = next(entry.facts for entry in reversed(entries) if entry.kind == "start")
    return entries[-1].kind != "end" and Path(facts["pages"]).exists() and bool(host.state(int(facts["pid"])))


def _step(step: int) -> str:
    return str(step) if step >= 0 else "none"


def _entries(run_dir: Path) -> list:  # type: ignore[type-arg]
    from ckpt.recovery.record import FILE, Record

    if not (run_dir / FILE).exists():
        raise CkptError(f"{run_dir} holds no run; give its folder as --run-dir")
    entries = Record(run_dir).entries()
    if not entries:
        raise CkptError(f"the run in {run_dir} has not begun")
    return entries


_OTHERS = {"why": why, "status": status, "report": report, "inject": inject, "simulate": simulate}


def main() -> None:
    """The console script."""
    if len(sys.argv) > 1 and sys.argv[1] in _OTHERS:
        common.run(_OTHERS[sys.argv.pop(1)])
    common.run(command)


if __name__ == "__main__":
    main()
