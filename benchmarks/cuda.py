"""Measures saves and loads of a training state on a CUDA device, and compares them with the limits of the bus and with torch.

    python benchmarks/cuda.py [--gib 4] [--leaves 0] [--rounds 5] [--data FOLDER] [--only ckpt dcp]

In each round, all savers take turns. For each of them it prints the median and the range of these figures:

- stall: the seconds until `save` returns, and their ratio to the time of one copy of the state to page-locked memory.
- durable: the seconds until the step is on the disk.
- step: the ratio of the time of a training step while the save runs in the background to that without a save.
- load: the seconds to fill the same tensors again from the page cache, and their ratio to a copy from page-locked memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckpt

Figures = dict[str, list[float]]
"""The samples of each figure of one saver."""


class Checkpointed:
    """ckpt, attached to no optimizer: the whole copy is made before `save` returns."""

    title = "ckpt"

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self._url, self._state = folder / "ckpt", state
        self._ck = ckpt.Checkpointer(self._url, every=10**9, keep=1)
        self._ck.step(0, state)  # maps the staging memory in the background, as in a training run

    def save(self, step: int) -> Callable[[], object]:
        return self._ck.save(step, self._state).result

    def load(self) -> None:
        ckpt.load(self._url, self._state)


class Dcp:
    """torch.distributed.checkpoint: async_save, which keeps its page-locked memory between saves."""

    title = "torch DCP"

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        self._folder, self._state = folder / "dcp", state
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)

    def save(self, step: int) -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        shutil.rmtree(self._folder, ignore_errors=True)
        writer = dcp.FileSystemWriter(self._folder, sync_files=True)
        saved: Any = dcp.async_save(self._state, storage_writer=writer, async_stager=self._stager, no_dist=True)
        return getattr(saved, "upload_completion", saved).result  # type: ignore[no-any-return]

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self._state, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)


class TorchSave:
    """torch.save and torch.load with a mapping of the file."""

    title = "torch.save"

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self._file, self._state = folder / "state.pt", state

    def save(self, step: int) -> Callable[[], object]:
        with self._file.open("wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def load(self) -> None:
        found = torch.load(self._file, mmap=True, weights_only=True)
        for name, tensor in self._state.items():
            tensor.copy_(found[name])


SAVERS = {"ckpt": Checkpointed, "dcp": Dcp, "torch": TorchSave}


def make_state(gib: float, leaves: int) -> dict[str, Any]:
    """Return fp32 tensors of `gib` GiB in all, on the device: `leaves` tensors of equal size, or 48 if `leaves` is 0."""
    count = int(gib * 2**30) // 4
    sizes = [count // leaves] * leaves if leaves else [count // 48] * 48
    return {f"layer{i}": torch.randn(size, device="cuda") for i, size in enumerate(sizes)}


def copy_seconds(state: dict[str, Any], buffer: Any, to_host: bool) -> float:
    """Return the seconds in which all bytes of the state are copied once between the device and page-locked memory."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    source, target = (device, buffer[:nbytes]) if to_host else (buffer[:nbytes], device)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


class TrainingStep:
    """Matrix products of about 20 ms, launched as a training step launches its kernels."""

    def __init__(self) -> None:
        self._a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def seconds(self) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(14):
            self._a @ self._a
        torch.cuda.synchronize()
        return time.perf_counter() - began


def measure(saver: Any, number: int, state: dict[str, Any], buffer: Any, step: TrainingStep, figures: Figures) -> None:
    """Add one round of one saver to its figures."""
    quiet = statistics.median(step.seconds() for _ in range(10))
    down = copy_seconds(state, buffer, to_host=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    finish = saver.save(number)
    stall = time.perf_counter() - began
    during = [step.seconds() for _ in range(10)]
    finish()
    durable = time.perf_counter() - began
    up = copy_seconds(state, buffer, to_host=False)
    expected = {name: tensor[:3].clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    torch.cuda.synchronize()
    loading = time.perf_counter()
    saver.load()
    torch.cuda.synchronize()
    load = time.perf_counter() - loading
    wrong = [name for name, tensor in state.items() if not tensor[:3].equal(expected[name])]
    if wrong:
        raise SystemExit(f"{saver.title}: {wrong[0]} was loaded with other values")
    found = {
        "stall s": stall, "stall/copy": stall / down, "durable s": durable, "step": statistics.median(during) / quiet,
        "load s": load, "load/copy": load / up,
    }  # fmt: skip
    for name, value in found.items():
        figures.setdefault(name, []).append(value)


def main() -> None:
    """Measure all savers, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4, help="the size of the state")
    parser.add_argument("--leaves", type=int, default=0, help="the number of tensors; 0: 48")
    parser.add_argument("--rounds", type=int, default=5, help="the rounds after the first one, which is printed alone")
    parser.add_argument("--data", type=Path, help="a folder on the disk to be measured; default: that of temporary files")
    parser.add_argument("--only", nargs="*", choices=SAVERS, default=list(SAVERS), help="measure only these")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device on this machine")
    folder = Path(tempfile.mkdtemp(prefix="ckpt-cuda-", dir=args.data))
    try:
        state, step = make_state(args.gib, args.leaves), TrainingStep()
        nbytes = sum(tensor.nbytes for tensor in state.values())
        buffer = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        copy_seconds(state, buffer, to_host=True)
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {nbytes / 1e9:.2f} GB in {len(state)} tensors",
            flush=True,
        )
        print(f"copy to page-locked memory {nbytes / 1e9 / copy_seconds(state, buffer, to_host=True):.1f} GB/s", flush=True)
        savers = {key: SAVERS[key](folder, state) for key in args.only}
        first: dict[str, Figures] = {key: {} for key in savers}
        later: dict[str, Figures] = {key: {} for key in savers}
        for number in range(1, args.rounds + 2):
            for key, saver in savers.items():
                measure(saver, number, state, buffer, step, first[key] if number == 1 else later[key])
        for key, saver in savers.items():
            print(f"{saver.title:12} first stall {first[key]['stall s'][0]:.3f} s", end="")
            for name, values in later[key].items():
                print(f" | {name} {statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})", end="")
            print(flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
