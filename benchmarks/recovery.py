"""Measures how fast ckpt-run detects a fault and how fast a job recovers, in comparison with torchrun.

    python benchmarks/recovery.py                              everything
    python benchmarks/recovery.py --only comeback --repeat 50
    python benchmarks/recovery.py --run-options=--warm         more options for ckpt-run

All processes share the cores of this machine. Four torch ranks on two cores take longer to start than one, so the import of
torch by the same number of processes is measured in the same run. Times are from the fault until every rank has done a step
again. "noticed" is the time until the first of the other ranks has been ended because of the fault.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from recovery_jobs import COLD, FAULTS, STEPS_BEFORE, WARM, Job, ckpt_run, job, series
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


# --- results ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """One figure: its samples and its target."""

    name: str
    unit: str
    samples: list[float] = field(default_factory=list)
    target: str = ""
    note: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of its row in a table."""
        if not self.samples:
            return self.name, self.note or "-", "", "", self.target
        figures = (show(value, self.unit) for value in (median(self.samples), p99(self.samples)))
        return self.name, *figures, str(len(self.samples)), self.target


@dataclass(slots=True)
class Results:
    """The results of one run."""

    ranks: int
    run_options: str
    rows: list[Row] = field(default_factory=list)
    comparison: dict[str, dict[str, Row]] = field(default_factory=dict)
    """The rows of the comparison with torchrun, by fault and then by launcher."""

    def row(self, name: str, unit: str, target: str = "") -> Row:
        """Add a row, and return it."""
        self.rows.append(Row(name, unit, target=target))
        return self.rows[-1]


def p99(samples: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(samples)[math.ceil(0.99 * len(samples)) - 1]


def show(value: float, unit: str) -> str:
    """Return a value with its unit as text."""
    if unit == "s":
        return f"{1e3 * value:.0f} ms" if value < 1 else f"{value:.2f} s"
    return f"{value:.3g} {unit}".rstrip()


# --- measurements ----------------------------------------------------------------------------------------------


def noticed(args: argparse.Namespace, results: Results) -> None:
    """Measure the detection, with ranks that do not wait for each other, so that only the launcher ends them."""
    for fault, target in (("kill", "≤ 50 ms"), ("stop", "≤ 1 s")):
        row = results.row(f"noticed: {FAULTS[fault][0]}", "s", target)
        row.samples = [each.noticed_seconds for each in series(args, COLD, fault) if math.isfinite(each.noticed_seconds)]
        print_row(row)


def lost_host(args: argparse.Namespace, results: Results) -> None:
    """Measure the detection of a lost host: of two hosts, the leader and the other are killed alternately."""
    row = results.row("noticed: a host is lost or cut off", "s", "≤ 4 s")
    options = "--cold --nnodes 2 --min 1 --patience 0 --no-memory --address 127.0.0.1"
    each = argparse.Namespace(**vars(args) | {"ranks": max(1, args.ranks // 2), "run_options": f"{args.run_options} {options}"})
    for number in range(args.repeat):
        folder = Path(tempfile.mkdtemp(prefix="ckpt-recovery-", dir=args.data))
        jobs: list[Job] = []
        try:
            for name in ("leads", "follows"):
                jobs.append(Job(ckpt_run(each, folder, "--name", name), folder, 2 * each.ranks, []))
                while not any(line["kind"] == "lead" for line in log_of(folder, check=False)):
                    time.sleep(0.1)
            if not jobs[0].until_steps(STEPS_BEFORE, 0.0, args.patience):
                raise SystemExit(f"two hosts did not start: see {folder}/stderr")
            members = next(line for line in log_of(folder) if line["kind"] == "start")["facts"]["members"]
            stays = ("follows", "leads")[number % 2]
            member = next(member for member in members if member["name"] == stays)
            files = [os.pidfd_open(pid) for pid in jobs[0].pids()[member["first"] : member["first"] + member["count"]]]
            began = time.monotonic()
            jobs[number % 2].process.kill()  # the orphan guard of that host ends its ranks
            if select.select(files, [], [], args.patience)[0]:
                row.samples.append(time.monotonic() - began)
            for file in files:
                os.close(file)
        finally:
            for one in jobs:
                one.end()
            shutil.rmtree(folder, ignore_errors=True)
    print_row(row)


def log_of(folder: Path, check: bool = True) -> list[dict[str, Any]]:
    """Return the entries of the log of a run. check=False: return none if the log can't be read, such as before the start."""
    command = [sys.executable, "-m", "ckpt.tools.run", "why", "--json", "--run-dir", str(folder / "run")]
    output = subprocess.run(command, capture_output=True, text=True, check=check).stdout
    return [json.loads(line) for line in output.splitlines()]


def comeback(args: argparse.Namespace, results: Results) -> None:
    """Measure the time from a kill to the next step, and what is lost."""
    imports = results.row(f"import torch, {args.ranks} at once", "s")
    imports.samples = [import_seconds(args.ranks) for _ in range(3)]
    print_row(imports)
    lost, redone = results.row("committed steps lost", "", "0"), results.row("steps done again, saved every 10", "")
    cold = f"≤ {median(imports.samples) + 2:.2f} s"
    targets = [("numpy", COLD, "p99 ≤ 1.5 s"), ("numpy", WARM, ""), ("torch", COLD, cold), ("torch", WARM, "≤ 2 s")]
    for kind, launcher, target in targets:
        start = "" if launcher == COLD else ", warm"
        row = results.row(f"kill -9 of 1 of {args.ranks} to the next step, {kind} script{start}", "s", target)
        found = series(args, launcher, "kill", "--kind", kind)
        row.samples = [each.next_step_seconds for each in found]
        lost.samples += [float(each.lost_commits) for each in found]
        redone.samples += [float(each.redone_steps) for each in found]
        print_row(row)


def import_seconds(count: int) -> float:
    """Return the seconds until `count` processes that start at the same time have imported torch."""
    began = time.monotonic()
    started = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(count)]
    for process in started:
        process.wait()
    return time.monotonic() - began


def overhead(args: argparse.Namespace, results: Results) -> None:
    """Measure steps of 10 ms without saves, alternately with and without ckpt-run."""
    cost = results.row("Checkpointer.step when nothing is due, after 10 ms of sleep", "µs", "≤ 20 µs")
    share = results.row("the same as a share of a step of 10 ms", "%", "≤ 0.1 %")
    computed = results.row("Checkpointer.step when nothing is due, after 10 ms of computing", "µs", "≤ 20 µs")
    share_computed = results.row("the same as a share of a step of 10 ms that computes", "%", "≤ 0.1 %")
    whole = results.row("a step under ckpt-run with ck.step / alone", "x")
    cpu = results.row("ckpt-run itself, of one core", "%")
    alone = argparse.Namespace(**vars(args) | {"ranks": 1})
    for _ in range(max(3, args.repeat // 3)):
        bare = step_seconds(alone, "bare", "--save", "none")
        with job(alone, WARM, "--seconds", "0.01", "--every", str(10**9), "--steps", "400") as running:
            running.until_steps(50, 0.0, args.patience)
            before, at = cpu_seconds(running.process.pid), time.monotonic()
            running.until_steps(350, 0.0, args.patience)
            cpu.samples.append(100 * (cpu_seconds(running.process.pid) - before) / (time.monotonic() - at))
            running.process.wait()
            whole.samples.append(per_step(running) / bare)
            cost.samples.append(step_cost(running))
            share.samples.append(cost.samples[-1] / 10_000 * 100)
        with job(alone, WARM, "--seconds", "0.01", "--every", str(10**9), "--steps", "400", "--compute") as running:
            running.process.wait()
            computed.samples.append(step_cost(running))
            share_computed.samples.append(computed.samples[-1] / 10_000 * 100)
    for row in (cost, share, computed, share_computed, whole, cpu):
        print_row(row)


def step_cost(running: Job) -> float:
    """Return the median of the microseconds that rank 0 spent in a call of Checkpointer.step."""
    return 1e6 * float((running.folder / "cost-0").read_text())


def step_seconds(args: argparse.Namespace, launcher: str, *program: str) -> float:
    """Return the mean seconds of a step of 10 ms under a launcher."""
    with job(args, launcher, "--seconds", "0.01", "--steps", "400", *program) as running:
        running.process.wait()
        return per_step(running)


def per_step(running: Job) -> float:
    """Return the mean seconds from step to step of rank 0."""
    at = [moment for what, _, moment in running.times(0) if what == "step"]
    return (at[-1] - at[0]) / (len(at) - 1)


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def jitter(args: argparse.Namespace, results: Results) -> None:
    """Count false detections of hangs, with step times that vary tenfold, saves of two seconds, and --hang 1."""
    row = results.row("false kills: step times that vary tenfold, saves that stall for 2 s", "", "0")
    steps = 80 * max(1, args.repeat)
    few = argparse.Namespace(**vars(args) | {"run_options": f"{args.run_options} --hang 1"})
    program = ["--seconds", "0.02", "--jitter", "10", "--long-save", "2", "--steps", str(steps)]
    with job(few, WARM, *program) as running:
        running.process.wait()
        row.samples = [float(sum(line["kind"] == "failure" for line in log_of(running.folder)))]
    row.note = f"{steps} steps on {args.ranks} ranks"
    print_row(row)


def compare(args: argparse.Namespace, results: Results) -> None:
    """Compare with torchrun: the same script and faults, with saves by ckpt, torch.save or torch DCP."""
    for fault in args.faults:
        rows = results.comparison[FAULTS[fault][0]] = {}
        for name, launcher, save in RIVALS:
            row = rows[name] = Row(f"{FAULTS[fault][0]}: {name}", "s")
            found = series(args, launcher, fault, "--kind", "torch", "--save", save)
            row.samples = [each.next_step_seconds for each in found if math.isfinite(each.next_step_seconds)]
            if len(row.samples) < len(found):
                row.note = f"never (given up after {args.patience:g} s)"
            print_row(row)


RIVALS = (
    (WARM, WARM, "ckpt"), (COLD, COLD, "ckpt"), ("torchrun, torch.save", "torchrun", "torch.save"),
    ("torchrun, DCP", "torchrun", "dcp"),
)  # fmt: skip
TASKS = {
    "noticed": noticed, "host": lost_host, "comeback": comeback, "overhead": overhead, "jitter": jitter, "torchrun": compare,
}  # fmt: skip


# --- tables ----------------------------------------------------------------------------------------------------


def print_row(row: Row) -> None:
    """Print a row when it is measured."""
    name, *cells = row.cells
    console.print(f"{name:72} {cells[0]:>12} {cells[1]:>12}", markup=False, soft_wrap=True)


def tables(results: Results) -> Iterator[Table]:
    """Yield the tables of the results."""
    if results.rows:
        table = Table("", box=SIMPLE_HEAD, pad_edge=False, title=f"ckpt-run, {results.ranks} ranks", title_justify="left")
        for name in ("median", "p99", "of", "to reach"):
            table.add_column(name, justify="right")
        for row in results.rows:
            table.add_row(*row.cells)
        yield table
    if results.comparison:
        names = [name for name, *_ in RIVALS]
        table = Table("fault to the next step", *(f"{name}\nmedian / p99" for name in names), box=SIMPLE_HEAD, pad_edge=False)
        for fault, rows in results.comparison.items():
            table.add_row(fault, *(comparison_cell(rows[name]) for name in names))
        yield table


def comparison_cell(row: Row) -> str:
    """Return the cell of a launcher in the table of the comparison."""
    return row.note or f"{show(median(row.samples), 's')} / {show(p99(row.samples), 's')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--repeat", type=int, default=10, help="how often each fault is injected (default: 10)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), help="those to compare with torchrun"
    )
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a recovery (default: 60)")
    parser.add_argument("--run-options", default="", help="more options for ckpt-run, as one string")
    parser.add_argument("--data", type=Path, default=HERE / "out", help="a folder on the disk to work in")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="for results (default: %(default)s)")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.ranks, args.run_options)
    for name in args.only:
        TASKS[name](args, results)
        (args.out / "recovery.json").write_text(json.dumps(asdict(results), indent=1) + "\n")
    for table in tables(results):
        console.print(table)


if __name__ == "__main__":
    main()
