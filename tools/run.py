"""ckpt-run: keeps a training job running."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt.recovery import place
from ckpt.storage.errors import CkptError, InvalidArgument
from ckpt.tools import common
from ckpt.tools.common import emit

if TYPE_CHECKING:
    from ckpt.recovery.agents import Report
    from ckpt.recovery.state import Entry

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_DEFAULT = "ckpt-run-files"

_folder = click.option(
    "--run-dir", type=click.Path(path_type=Path), default=_DEFAULT, show_default=True,
    help="Where the run keeps its record and logs.",
)
_state = click.option("--state", metavar="URL", help="The state of a run on several hosts: etcd://HOST:PORT,…/NAME.")


@click.command("ckpt-run", context_settings=_SETTINGS | {"ignore_unknown_options": False})
@click.option("-n", "--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes on each host.")
@click.option("--nnodes", type=click.IntRange(1), help="Hosts; start it on each. More wait as spares.  [default: 1]")
@click.option("--min", "least", type=click.IntRange(1), help="Go on with so many hosts, if need be.  [default: all]")
@_state
@_folder
@click.option(
    "--launcher", type=click.Choice(place.LAUNCHERS), default="local", show_default=True,
    help="mpiexec: starts the ranks. Others start this command on each host: names and counts of hosts are theirs.",
)
@click.option("--name", help="Of this host.  [default: as the launcher or the system calls it]")
@click.option("--address", help="Where other hosts reach this one.  [default: the one that reaches the state]")
@click.option(
    "--restarts", type=click.IntRange(0), default=10, show_default=True, help="Restarts in a row without a newer step.",
)
@click.option(
    "--grace", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds to save in, after SIGTERM.",
)
@click.option(
    "--patience", type=click.FloatRange(0), default=30.0, show_default=True,
    help="Seconds to wait for a host in place of a lost one, before going on with fewer.",
)
@click.option(
    "--give-up", type=click.FloatRange(0), default=600.0, show_default=True,
    help="Seconds to wait for too few hosts, and for all of them at first.",
)
@click.option(
    "--hang", type=click.FloatRange(1), default=10.0, show_default=True, help="Least seconds of silence that are a hang.",
)
@click.option(
    "--first-hang", type=click.FloatRange(1), default=900.0, show_default=True, help="As long as nothing is learned.",
)
@click.option(
    "--spike", type=click.FloatRange(0, min_open=True), metavar="FACTOR",
    help="A loss that is so many times the usual spread above the usual is a failure; 10 is a good value. Off unless given.",
)
@click.option("--show", type=click.Choice(["0", "all", "none"]), default="0", show_default=True, help="Whose output to show.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    ranks: int, nnodes: int | None, least: int | None, state: str | None, run_dir: Path, launcher: str, name: str | None,
    address: str | None, restarts: int, grace: float, patience: float, give_up: float, hang: float, first_hang: float,
    spike: float | None, show: str, command: tuple[str, ...],
) -> int:  # fmt: skip
    """Run COMMAND as so many ranks, and start them again from what they saved when one of them fails.

    \b
      ckpt-run -n 4 -- python train.py --lr 1e-4
      ckpt-run -n 8 --nnodes 4 --min 3 --state etcd://host0:2379/lab -- python train.py     on each host
      ckpt-run why                   what was decided, and why
      ckpt-run report                where the time went

    A rank is told who it is as by torchrun (RANK, WORLD_SIZE, MASTER_ADDR …). A rank that uses ckpt.Checkpointer is
    noticed when it hangs, too, and is asked to save before the job ends. Exit status: 0 all ranks ended well, 1 the job was
    given up, 128 + n it was ended by signal n.
    """
    from ckpt.recovery.agent import Agent, Here
    from ckpt.recovery.course import Spec
    from ckpt.recovery.limits import FIRST_SECONDS, Limits
    from ckpt.recovery.state import open_state
    from ckpt.spikes import FACTOR

    if spike is not None:
        os.environ[FACTOR] = str(spike)  # the ranks inherit it

    hosts = nnodes or place.hosts_of(launcher, os.environ) or 1
    if least is not None and least > hosts:
        raise InvalidArgument(f"--min {least} is more than the {hosts} hosts of --nnodes")
    if launcher == "mpiexec" and hosts > 1:
        raise InvalidArgument("--launcher mpiexec starts the ranks of one host; leave out --nnodes")
    name = name or place.name_of(launcher, os.environ)
    lock, name = (place.lock_run(run_dir), name) if hosts == 1 else place.lock_name(run_dir, name)
    first = {phase: min(seconds, first_hang) for phase, seconds in FIRST_SECONDS.items()}
    limits = Limits(least_seconds=hang, first_seconds=first)
    here = Here(name, run_dir, address or place.address_of(state if hosts > 1 else None), limits, show, launcher == "mpiexec")
    spec = Spec(command, ranks, hosts, least or hosts, restarts, grace, patience, give_up)
    opened = open_state(run_dir, state)
    try:
        return Agent(spec, here, opened, lambda text: common.complain("ckpt-run", text)).run()
    finally:
        opened.close()
        os.close(lock)


@click.command("ckpt-run why", context_settings=_SETTINGS)
@_folder
@_state
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document a line.")
def why(run_dir: Path, state: str | None, as_json: bool) -> int:
    """Print what was decided, and why."""
    from ckpt.recovery.state import as_json as lines

    for entry in _entries(run_dir, state):
        if as_json:
            emit(lines(entry))
        elif entry.kind not in ("run", "failure"):
            at = datetime.datetime.fromtimestamp(entry.at).strftime("%H:%M:%S")
            what = f"{entry.facts['action']}: " if entry.kind == "decision" else ""
            emit(f"{at}  attempt {entry.attempt}  {entry.kind}  {what}{common.printable(entry.text)}")
    return 0


@click.command("ckpt-run status", context_settings=_SETTINGS)
@_folder
@_state
def status(run_dir: Path, state: str | None) -> int:
    """Show what a run does now: its hosts, and the ranks of this one. Exit status: 0 it runs, 1 it does not."""
    from ckpt.recovery.course import Course

    entries = _entries(run_dir, state)
    course = Course().went_on(entries)
    reports = _living(run_dir, state)
    if course.over or not reports:
        emit(f"it does not run: {entries[-1].text}")
        return 1
    first = {member.name: member.first for member in course.members}
    if len(reports) > 1:
        rows = [
            (r.name, r.doing if r.name in first else "spare", str(first.get(r.name, "")), _step(r.step), _step(r.committed),
             "coordinates" if r.name == course.leader else "")
            for r in sorted(reports.values(), key=lambda r: (first.get(r.name, 1 << 60), r.joined))
        ]  # fmt: skip
        common.show_table(("host", "does", ">first rank", ">step", ">committed", ""), rows)
    for report in reports.values():
        ranks = list(_ranks(report.pages, report.attempt))
        if ranks:
            common.show_table((">rank", ">process", "phase", ">step", ">committed", ">silent for"), ranks)
            emit(f"attempt {report.attempt}; logs in {report.logs}/{report.attempt}")
    return 0


def _ranks(pages: str, attempt: int) -> Iterator[tuple[str, ...]]:
    """What the ranks of an agent do, where it is on this host."""
    from ckpt.pulse import Pulse

    for number in sorted(int(p.name.partition("-")[2]) for p in Path(pages).glob(f"{attempt}-*")):
        beat = Pulse(Path(pages) / f"{attempt}-{number}").read()
        silent = f"{time.monotonic() - beat.since:.1f} s"
        yield str(number), str(beat.pid or "?"), beat.phase, _step(beat.step), _step(beat.committed), silent


def _living(run_dir: Path, state: str | None) -> dict[str, Report]:
    """The agents that say something while one listens."""
    from ckpt.recovery.agents import SAY_SECONDS, Roll, report
    from ckpt.recovery.state import open_state

    opened, roll = open_state(run_dir, state), Roll()
    until = time.monotonic() + 3 * SAY_SECONDS
    while (now := time.monotonic()) < until:
        told = {name: report(facts) for name, facts in opened.reports().items()}
        roll.hear(told, now)
        if len(roll.living()) == len(told):
            break
        time.sleep(0.05)
    opened.close()
    return roll.living()


@click.command("ckpt-run drain", context_settings=_SETTINGS)
@_folder
@_state
def drain(run_dir: Path, state: str | None) -> int:
    """Let a run save, and end: all ranks after the same step."""
    from ckpt.recovery.course import Course
    from ckpt.recovery.state import Draft, open_state

    opened = open_state(run_dir, state)
    while True:
        course = Course().went_on(_entries(run_dir, state))
        if course.over:
            raise CkptError(f"it does not run: {course.last.text if course.last else ''}")
        if opened.append(course.number, [Draft(course.attempt, "request", "drain", {})]):
            break
    emit("it saves and ends; see `ckpt-run status`")
    return 0


@click.command("ckpt-run plan", context_settings=_SETTINGS)
@_folder
@_state
@click.option("--dry-run", is_flag=True, help="Only say what would be done. There is no other way yet to call it.")
@click.option("--lose", multiple=True, metavar="HOST", help="Suppose that this host is lost.")
@click.option("--fail", type=click.IntRange(0), metavar="RANK", help="Suppose that this rank is killed.")
def plan(run_dir: Path, state: str | None, dry_run: bool, lose: tuple[str, ...], fail: int | None) -> int:
    """Say what would be decided if something went wrong now, without doing it."""
    from ckpt.recovery.dry_run import suppose

    entries, reports = _entries(run_dir, state), _living(run_dir, state)
    for name in lose:
        if name not in reports:
            raise CkptError(f"{name} is no host of this run; there are {', '.join(sorted(reports))}")
    for draft in suppose(entries, reports, lose, fail):
        emit(f"{draft.kind}  {common.printable(draft.text)}")
    return 0


@click.command("ckpt-run inject", context_settings=_SETTINGS)
@click.argument("fault", type=click.Choice(["kill", "stop", "term", "abort"]))
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True)
@_folder
@_state
def inject(fault: str, rank: int, run_dir: Path, state: str | None) -> int:
    """Do something bad to a rank of this host, to see what happens: kill it, stop it, end it, let it dump core."""
    from ckpt.pulse import Pulse

    pages = [Path(report.pages) / f"{report.attempt}-{rank}" for report in _living(run_dir, state).values()]
    page = next((page for page in pages if page.exists()), None)
    if page is None:
        raise CkptError(f"there is no rank {rank} here now: see `ckpt-run status --run-dir {run_dir}`")
    pid = Pulse(page).read().pid
    if not pid:
        raise CkptError(f"rank {rank} has not opened a Checkpointer yet, so its process is not known")
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "abort": signal.SIGABRT}[fault]
    os.kill(pid, number)
    emit(f"{number.name} was sent to rank {rank}, process {pid}")
    return 0


@click.command("ckpt-run report", context_settings=_SETTINGS)
@_folder
@_state
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def report(run_dir: Path, state: str | None, as_json: bool) -> int:
    """Print where the time of a run went."""
    from ckpt.recovery.ledger import NAMES, totals

    entries, seconds = _entries(run_dir, state), totals(run_dir)
    total = sum(seconds.values()) or 1.0
    if as_json:
        common.emit_json({"seconds": dict(seconds), "restarts": sum(e.kind == "failure" for e in entries)})
        return 0
    rows = [(name, f"{seconds.get(name, 0.0):.2f} s", f"{100 * seconds.get(name, 0.0) / total:.1f} %") for name in NAMES]
    common.show_table(("", ">seconds", ">share"), rows)
    emit(f"{total:.2f} s in all; {common.count(sum(e.kind == 'failure' for e in entries), 'failure')}")
    return 0


def _step(step: int) -> str:
    return str(step) if step >= 0 else "none"


def _entries(run_dir: Path, state: str | None) -> list[Entry]:
    from ckpt.recovery.record import FILE
    from ckpt.recovery.state import open_state

    if state is None and not (run_dir / FILE).exists():
        raise CkptError(f"{run_dir} holds no run; give its folder as --run-dir")
    opened = open_state(run_dir, state)
    entries = opened.entries()
    opened.close()
    if not entries:
        raise CkptError(f"the run in {state or run_dir} has not begun")
    return entries


_OTHERS = {"why": why, "status": status, "report": report, "inject": inject, "drain": drain, "plan": plan}


def main() -> None:
    """The console script."""
    if len(sys.argv) > 1 and sys.argv[1] in _OTHERS:
        common.run(_OTHERS[sys.argv.pop(1)])
    common.run(command)


if __name__ == "__main__":
    main()
