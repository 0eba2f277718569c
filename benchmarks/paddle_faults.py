"""Compares what ckpt, paddle.save and paddle.distributed.save_state_dict do after faults: a kill in the middle, a flipped byte.

    .venv-frameworks/paddle-newest/bin/python benchmarks/paddle_faults.py [FOLDER] [MIB]

It needs the environment that `make test-framework-paddle` makes. MIB: size of the arrays of each save. For each way, a process
saves the value 1, and saves the value 2 to the same place. It is killed in the second save, each time at a later moment. Then,
in a whole save, one bit is flipped at several places, and it is loaded.
"""

from __future__ import annotations

import collections
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WAYS = ("ckpt.save", "paddle.save", "paddle.distributed.save_state_dict")
KILLS = 12
FLIPS = 12


def main() -> None:
    if len(sys.argv) > 4 and sys.argv[1] == "--save":
        save(*sys.argv[2:])
        return
    root = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    mib = sys.argv[2] if len(sys.argv) > 2 else "64"
    try:
        for way in WAYS:
            print(f"{way:<40} killed: {counts(killed(way, root, mib))}")
            print(f"{way:<40} a flipped bit: {counts(flipped(way, root, mib))}")
    finally:
        shutil.rmtree(root)


def state(mib: float, value: float) -> dict[str, object]:
    import paddle

    return {f"layer.{i}": paddle.full([max(1, int(mib * 2**20 / 32))], value) for i in range(8)}


def save(way: str, folder: str, mib: str) -> None:
    """Save 1, then 2, to one place; write a line before and after the second save."""
    writer = writer_of(way, folder)
    writer(state(float(mib), 1.0), 1)
    second = state(float(mib), 2.0)
    print("begin", flush=True)
    writer(second, 2)
    print("end", flush=True)


def writer_of(way: str, folder: str) -> Callable[[dict[str, object], int], object]:
    import paddle

    if way == "ckpt.save":
        import ckpt

        return lambda saved, step: ckpt.save(saved, folder, step)
    if way == "paddle.save":
        return lambda saved, _: paddle.save(saved, f"{folder}/model.pdparams")
    return lambda saved, _: paddle.distributed.save_state_dict(saved, folder)


def load(way: str, folder: Path, mib: str) -> str:
    """Load what was saved, and return which save it was, or how the load failed."""
    target = state(float(mib), 0.0)
    try:
        if way == "ckpt.save":
            import ckpt

            ckpt.load(folder, like=target)
        elif way == "paddle.save":
            import paddle

            target = paddle.load(f"{folder}/model.pdparams")
        else:
            import paddle

            paddle.distributed.load_state_dict(target, str(folder))
    except Exception as error:
        return f"refused with {type(error).__name__}"
    values = {float(part) for tensor in target.values() for part in (tensor.min(), tensor.max())}  # type: ignore[attr-defined]
    names = {(1.0,): "the first save", (2.0,): "the second save"}
    return names.get(tuple(sorted(values)), "wrong values without an error")


def killed(way: str, root: Path, mib: str) -> list[str]:
    """Return what is loaded after kills at different moments of the second save."""
    seconds = run(way, root / "whole", mib, None)
    shutil.rmtree(root / "whole")
    found = []
    for i in range(KILLS):
        folder = root / f"killed-{i}"
        run(way, folder, mib, seconds * (i + 0.5) / KILLS)
        found.append(load(way, folder, mib))
        shutil.rmtree(folder)
    return found


def run(way: str, folder: Path, mib: str, kill: float | None) -> float:
    """Run a process that saves twice, and kill it this long after the start of the second save; return how long that took."""
    folder.mkdir()
    command = [sys.executable, __file__, "--save", way, str(folder), mib]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        while "begin" not in (line := process.stdout.readline()):
            assert line, "the process has failed"
        start = time.perf_counter()
        if kill is not None:
            time.sleep(kill)
            os.kill(process.pid, signal.SIGKILL)
        while (line := process.stdout.readline()) and "end" not in line:
            pass
        return time.perf_counter() - start


def flipped(way: str, root: Path, mib: str) -> list[str]:
    """Return what is loaded after one bit of the largest file is flipped, at different places."""
    folder = root / "flipped"
    folder.mkdir()
    writer_of(way, str(folder))(state(float(mib), 1.0), 1)
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    size, found = largest.stat().st_size, []
    for i in range(FLIPS):
        flip(largest, size * (2 * i + 1) // (2 * FLIPS))
        found.append(load(way, folder, mib))
        flip(largest, size * (2 * i + 1) // (2 * FLIPS))
    shutil.rmtree(folder)
    return found


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def counts(found: list[str]) -> str:
    return ", ".join(f"{count} x {what}" for what, count in collections.Counter(found).most_common())


if __name__ == "__main__":
    main()
