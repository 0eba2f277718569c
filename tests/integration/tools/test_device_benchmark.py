"""`benchmarks/devices.py` measures real devices, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
GROUPS = [Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")]

# One choice of each kind, so that a round has few processes. The counters of a control group go with it.
PROGRAM = """
import devices, disk_limits, fio_sweep
fio_sweep.THREADS = (4,)
for choices in (devices.PAST_CACHE, devices.THROUGH_CACHE, devices.APPENDS):
    del choices[1:]
remove = disk_limits.LimitedDisk.remove
def counted_remove(disk):
    counters = [disk._group / "blkio.throttle.io_service_bytes", disk._group / "io.stat"]
    print(*(file.read_text() for file in counters if file.exists()))
    remove(disk)
disk_limits.LimitedDisk.remove = counted_remove
devices.main()
"""

pytest.importorskip("psutil")  # of the extra bench


def run(folder: Path, *arguments: str) -> str:
    """Return what the benchmark prints for 32 MiB and one round; it leaves nothing behind."""
    command = [sys.executable, "-c", PROGRAM, str(folder), "--mib", "32", "--rounds", "1", *arguments]
    with subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as benchmark:
        printed, errors = benchmark.communicate(timeout=600)
    assert not benchmark.returncode, errors
    assert not left_behind(folder, benchmark)
    return printed


def left_behind(folder: Path, benchmark: subprocess.Popen[str]) -> list[Path]:
    """Return the folders and control groups that a run has made and not removed."""
    return [*folder.iterdir(), *made_by(benchmark.pid)]


def made_by(process: int) -> list[Path]:
    """Return the folders and control groups outside of the folder of a run."""
    return [path for parent in (Path("/dev/shm"), *GROUPS) for path in parent.glob(f"ckpt-bench-{process}-*")]


def table_rows(printed: str) -> dict[str, list[str]]:
    """Return the cells of the table by device and work."""
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return {f"{device}: {work}": rest for device, work, *rest in lines[1:]}


def test_each_work_is_compared_with_one_choice_of_each_kind(tmp_path: Path) -> None:
    rows = table_rows(run(tmp_path, "--device", "memory", "--device", "disk"))
    assert {name for name in rows if name.startswith("tmpfs")} == {"tmpfs: save", "tmpfs: hot load", "tmpfs: hot restore"}
    assert {name for name in rows if name.startswith("disk")} == {
        "disk: save", "disk: cold load", "disk: cold restore", "disk: hot load", "disk: hot restore",
    }  # fmt: skip
    for name, (speed, first, _, _, best, ratio) in rows.items():
        assert float(speed) > 0, name
        assert float(first) > 0, name
        found = re.fullmatch(r"(\d+): 1 (page cache|requests of 0.5 MiB|appends)", best)
        assert found, (name, best)
        assert float(ratio.split()[0]) == pytest.approx(float(speed) / float(found[1]), abs=0.02, rel=0.02), name


def test_the_work_goes_through_the_limited_disk(tmp_path: Path) -> None:
    printed = run(tmp_path, "--device", "slow")
    if skipped := re.search(r"skipped: .*", printed):
        pytest.skip(skipped[0])
    assert table_rows(printed).keys() >= {"disk, 200 MB/s: save", "disk, 200 MB/s: cold restore"}
    read = sum(int(n) for n in re.findall(r"(?: Read |rbytes=)(\d+)", printed))
    written = sum(int(n) for n in re.findall(r"(?: Write |wbytes=)(\d+)", printed))
    # First and round: two saves and one fixed; two loads, two restores and two fixed. Some pages may stay cached.
    assert written >= 3 * 32 << 20
    assert read >= 5 * 32 << 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_removes_the_device(tmp_path: Path, number: signal.Signals) -> None:
    device = "memory" if os.geteuid() else "slow"
    command = [sys.executable, str(BENCHMARKS / "devices.py"), str(tmp_path), "--mib", "32", "--device", device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as benchmark:
        deadline = time.monotonic() + 600
        while not left_behind(tmp_path, benchmark) and benchmark.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        benchmark.send_signal(number)
        printed, _ = benchmark.communicate(timeout=600)
    if skipped := re.search(r"skipped: .*", printed):
        pytest.skip(skipped[0])
    assert benchmark.returncode
    assert not left_behind(tmp_path, benchmark)


# Makes a device again and again, with an interrupt before the first line that runs, before the second one, and so on until it
# is made before the interrupt comes. Prints what is left of each. Lines of `subprocess` don't count: Popen forgets a child
# whose start is interrupted.
INTERRUPTED_PROGRAM = """
import json, subprocess, sys, tempfile
from pathlib import Path
import emulated_devices

folder, name = Path(sys.argv[1]), sys.argv[2]
files = {emulated_devices.__file__, sys.modules["disk_limits"].__file__, tempfile.__file__}
tempfile._get_candidate_names()  # an interrupt in here would leave a lock

def interrupt_before(line):
    def trace(frame, event, argument):
        nonlocal line
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            line -= 1
            if line < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace
    return trace

for line in range(10_000):
    try:
        sys.settrace(interrupt_before(line))
        with emulated_devices.new_folder(folder / "work") as work, emulated_devices.DEVICES[name][1](work, 1):
            sys.settrace(None)
            break
    except KeyboardInterrupt:
        loops = subprocess.run(["losetup", "--list", "--noheadings", "--output", "BACK-FILE"], capture_output=True, text=True)
        print(json.dumps({"line": line, "folder": (folder / "work").exists(), "loops": loops.stdout.count(str(folder))}))
    except emulated_devices.Missing as missing:
        print(json.dumps({"missing": str(missing)}))
        break
"""


@pytest.mark.parametrize("device", ["memory", "slow", "sectors"])
def test_an_interrupt_before_any_line_removes_the_device(tmp_path: Path, device: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_PROGRAM, str(tmp_path), device]
    with subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True) as program:
        printed, _ = program.communicate(timeout=600)
    assert not program.returncode
    runs = [json.loads(line) for line in printed.splitlines()]
    if "missing" in runs[-1]:
        pytest.skip(runs[-1]["missing"])
    assert len(runs) > 5
    assert [run for run in runs if run["folder"] or run["loops"]] == []
    assert made_by(program.pid) == []
