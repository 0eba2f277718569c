"""Saves and loads one state on emulated devices, and compares the speed to that of fio and to fixed choices of ckpt's own.

    python benchmarks/devices.py [FOLDER]                     all devices that this machine can emulate
    python benchmarks/devices.py --device slow --device fuse  some of them

FOLDER is on the disk under test. Some devices need root: then Linux limits the disk for the processes of this script, or mounts
a file system on a loop device. `emulated_devices.py` has the list. A device that can't be made is skipped with the reason.

The work is a durable save, cold loads from the device, and hot ones from the page cache, by `ckpt.load` and by
`Checkpointer.restore`. A round does each of these once as ckpt chooses, once with each fixed choice, and once by fio in each of
{buffered, O_DIRECT} x {1, 4, 16} threads, in another order than the round before. Each run is a new process. What ckpt learns
of a device lasts from round to round. The *first* load begins without it, and is not one of the rounds.

The best choice is the one with the highest median. A ratio is computed within each round: the speed of ckpt over that of the
best choice. The table has its median, least and most.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import fio_sweep
from device_work import FixedChoice, Work
from emulated_devices import DEVICES, Device, Missing, new_folder
from fio_sweep import FioRun
from probes import drop_file
from rich.console import Console

HERE = Path(__file__).resolve().parent
MIB = 1 << 20

PAST_CACHE = [FixedChoice("requests", count, nbytes) for count in (1, 4, 16) for nbytes in (MIB // 2, 4 * MIB)]
THROUGH_CACHE = [FixedChoice("page cache", count) for count in (1, 4, 16)]
OVER_NETWORK = [FixedChoice("requests", count, nbytes) for count in (4, 16, 64) for nbytes in (MIB, 4 * MIB)]
APPENDS = [FixedChoice("appends", count) for count in (1, 4, 16)]
PARTS = [FixedChoice("parts", count, nbytes) for count in (2, 8, 32) for nbytes in (8 * MIB, 16 * MIB)]

console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work. `choices` and `fio` are what ckpt's own choice is compared with."""

    title: str
    works: tuple[str, ...]
    """The calls of ckpt that do it: each is a row of the table."""
    is_cold: bool
    choices: list[FixedChoice]
    fio: list[FioRun]

    @property
    def cases(self) -> list[Case]:
        return [*map(Own, self.works), *self.choices, *self.fio]


@dataclass(frozen=True, slots=True)
class Own:
    """A call of ckpt, which chooses by itself."""

    work: str


Case = Own | FixedChoice | FioRun


@dataclass(slots=True)
class DeviceRun:
    """The measurements of one device."""

    device: Device
    folder: Path
    """A folder on the disk under test, for what ckpt learns."""
    mib: int
    first: dict[tuple[str, str], float] = field(default_factory=dict)
    """MB/s of the first save and loads, by title of the row and call."""
    samples: dict[tuple[str, Case], list[float]] = field(default_factory=dict)
    """MB/s of each round."""

    def prepare(self) -> None:
        """Store the step that is loaded, and the file that fio reads."""
        self._run_ckpt(Work("prepare", self._loads, self.mib))
        if not self.device.is_remote:
            self._fio_file.write_bytes(os.urandom(MIB) * self.mib)

    def rows(self) -> list[Row]:
        """Return the kinds of work that this device allows."""
        if self.device.is_remote:
            saves = APPENDS + (PARTS if self.device.has_parts else [])
            return [Row("save", ("save",), False, saves, []), Row("load", ("load",), True, OVER_NETWORK, [])]
        save = Row("save", ("save",), False, APPENDS, fio_sweep.sweep("write"))
        cold = Row("cold", ("load", "restore"), True, THROUGH_CACHE + PAST_CACHE, fio_sweep.sweep("read"))
        hot = Row("hot", ("load", "restore"), False, THROUGH_CACHE, fio_sweep.sweep("read", (False,)))
        return [save, hot] if self.device.is_memory else [save, cold, hot]

    def measure(self, row: Row, case: Case) -> float:
        """Return the MB/s of one case."""
        if isinstance(case, FioRun):
            seconds = self._run_fio(case, row.is_cold)
        else:
            # Only `restore` reads past the page cache of a local file system.
            past_cache = isinstance(case, FixedChoice) and case.kind == "requests" and not self.device.is_remote
            kind = case.work if isinstance(case, Own) else "restore" if past_cache else row.works[0]
            work = Work(
                kind, self._saves if kind == "save" else self._loads, self.mib, row.is_cold,  # type: ignore[arg-type]
                None if isinstance(case, Own) else case, self.device.groups,
            )  # fmt: skip
            seconds = self._run_ckpt(work)
        return self.mib * MIB / 1e6 / seconds

    @property
    def _loads(self) -> str:
        return f"{self.device.url}/loads"

    @property
    def _saves(self) -> str:
        return f"{self.device.url}/saves"

    @property
    def _fio_file(self) -> Path:
        return Path(self.device.url) / "fio.bin"

    def _run_fio(self, run: FioRun, is_cold: bool) -> float:
        file = self._fio_file
        if run.direction == "write":
            file = file.with_name("fio-write.bin")
        elif is_cold:
            drop_file(file)
        else:
            file.read_bytes()
        try:
            with self.device.while_working():
                return fio_sweep.measure(run, file, self.mib, self.device.groups)
        finally:
            if run.direction == "write":
                file.unlink(missing_ok=True)

    def _run_ckpt(self, work: Work) -> float:
        learned = {"CKPT_CACHE_DIR": str(self.folder / "learned")}
        if work.choice is not None:
            learned = {"CKPT_CACHE_DIR": ""}
        environment = {**os.environ, **self.device.environment, **learned}
        command = [sys.executable, str(HERE / "device_work.py"), work.to_json()]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, env=environment, **streams) as child:  # type: ignore[call-overload]
            try:
                if child.stdout.readline() == "ready\n":
                    with self.device.while_working():
                        child.stdin.write("\n")
                        child.stdin.flush()
                        seconds = child.stdout.readline()
                _, errors = child.communicate()
            except BaseException:
                child.kill()
                raise
        if child.returncode:
            raise RuntimeError((errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1])
        return float(seconds)


def run_device(run: DeviceRun, rounds: int, order: random.Random) -> None:
    """Measure everything on one device in rounds."""
    why_no_fio = fio_sweep.why_missing()
    rows = [replace(row, fio=[]) if why_no_fio else row for row in run.rows()]
    if why_no_fio and not run.device.is_remote:
        console.print(f"  without fio: {why_no_fio}")
    run.prepare()
    for row in rows:
        for work in row.works:
            run.first[row.title, work] = run.measure(row, Own(work))
    cases = [(row, case) for row in rows for case in row.cases]
    for number in range(rounds):
        began = time.monotonic()
        order.shuffle(cases)
        for done, (row, case) in enumerate(cases):
            if sys.stdout.isatty():
                console.print(f"  round {number + 1} of {rounds}: {done} of {len(cases)}", end="\r")
            run.samples.setdefault((row.title, case), []).append(run.measure(row, case))
        console.print(f"  round {number + 1} of {rounds}: {len(cases)} cases in {time.monotonic() - began:.0f} s")


def table(run: DeviceRun, title: str) -> Iterable[str]:
    """Yield a line of the table for each call of ckpt."""
    for row in run.rows():
        for work in row.works:
            own = run.samples[row.title, Own(work)]
            what = work if row.title == work else f"{row.title} {work}"
            yield cells(
                title, what, f"{median(own):.0f}", f"{run.first[row.title, work]:.0f}",
                *against(run, row.title, row.fio, own), *against(run, row.title, row.choices, own),
            )  # fmt: skip


def against(run: DeviceRun, title: str, cases: Iterable[Case], own: list[float]) -> tuple[str, str]:
    """Return the best of some cases with its median, and the ratio of ckpt to it."""
    measured = {case: samples for case in cases if (samples := run.samples.get((title, case)))}
    if not measured:
        return "", ""
    best = max(measured, key=lambda case: median(measured[case]))
    ratios = [mine / other for mine, other in zip(own, measured[best], strict=True)]
    return f"{median(measured[best]):.0f}: {best}", f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def cells(*words: str) -> str:
    return f"| {' | '.join(words)} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=HERE / "out", metavar="FOLDER")
    parser.add_argument("--device", choices=DEVICES, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256, help="the size of the state, a multiple of 32")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of the order within the rounds")
    args = parser.parse_args()
    if args.rounds < 1 or args.mib < 32 or args.mib % 32:
        parser.error("--rounds is at least 1, --mib a multiple of 32")
    return args


def main() -> None:
    """Measure the devices one after the other, and print the table."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that SIGTERM removes the devices, too
    console.print(f"{args.mib} MiB, {args.rounds} rounds, order of seed {args.seed}")
    args.folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    try:
        for name in args.device or DEVICES:
            lines += measured_lines(name, args)
    finally:  # also after Ctrl-C
        print(cells("device", "work", "ckpt MB/s", "first", "best of fio", "ckpt / fio", "best fixed choice", "ckpt / fixed"))
        print("|---|---|---:|---:|---|---:|---|---:|", *lines, sep="\n")


def measured_lines(name: str, args: argparse.Namespace) -> list[str]:
    """Return the lines of the table for a device; none, if it can't be made here."""
    title, make = DEVICES[name]
    console.print(f"{name}: {title}")
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(new_folder(args.folder / f"ckpt-devices-{os.getpid()}"))
            run = DeviceRun(stack.enter_context(make(folder, 4 * args.mib)), folder, args.mib)
            run_device(run, args.rounds, random.Random(args.seed))
    except Missing as missing:
        console.print(f"  skipped: {missing}")
        return []
    return list(table(run, title))


if __name__ == "__main__":
    main()
