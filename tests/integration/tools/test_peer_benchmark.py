"""`benchmarks/one.py` measures each peer fairly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

# A process that saves: it has 64 MiB of its own, and 128 MiB that it shares with the process that is measured.
PROGRAM = """
import mmap, multiprocessing, time
from probes import PeakMemory

def save(shared, own_bytes, ready):
    own = b"x" * own_bytes
    sum(shared[at] for at in range(0, len(shared), 4096))
    ready.set()
    time.sleep(600)

context = multiprocessing.get_context("fork")
ready = context.Event()
with PeakMemory(lambda: [child.pid for child in multiprocessing.active_children()]) as memory:
    shared = mmap.mmap(-1, 128 << 20)
    shared[:] = b"x" * len(shared)
    child = context.Process(target=save, args=(shared, 64 << 20, ready), daemon=True)
    child.start()
    ready.wait()
    time.sleep(0.5)
child.terminate()
child.join()
print(memory.nbytes)
"""

pytest.importorskip("psutil")  # of the extra bench


def test_memory_of_a_process_that_saves_counts_once() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stderr
    found = int(done.stdout)
    assert 190 << 20 < found < 256 << 20


def test_memory_of_the_process_of_torch_dcp_is_a_part_of_its_peak(tmp_path: Path) -> None:
    """Its process imports torch, which takes more than 100 MiB; the state has 4 MiB."""
    pytest.importorskip("torch")
    program = (
        "import sys, pathlib, one, peers, torch\n"
        "peer = peers.PEERS['dcp-process']()\n"
        "found = one.measure_peer(peer, {'a': torch.ones(1 << 20)}, pathlib.Path(sys.argv[1]), 1)\n"
        "print(found.save_memory_bytes)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stderr
    assert int(done.stdout) > 100 << 20
