"""Compares the namespace with GlusterFS: six nodes or bricks on one disk, 4+2 in both, in alternating rounds.

    apt-get install glusterfs-server            # on Debian; needs root, FUSE and an address that is not loopback
    python benchmarks/gluster.py [--data DIR] [--gib 1] [--rounds 3]

Files of 128 MiB are written four at a time, and each is durable before the next: through the mount of GlusterFS with fsync, and
through the client of the namespace. Reads begin with an empty page cache, if the system allows dropping it. At the end, two of
six are killed in both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import numpy as np
from nodes import namespace, nodes, print_row, rows, timed

HERE = Path(__file__).resolve().parent
FILE_BYTES = 128 << 20
CHUNK = 8 << 20


def run_gluster(*words: str) -> str:
    """Run a gluster command, and return its output; end the program if it fails."""
    done = subprocess.run(["gluster", "--mode=script", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"gluster {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def gluster(where: Path) -> Iterator[tuple[Path, str]]:
    """A context with the mount point and the name of a volume of six bricks."""
    if not shutil.which("glusterd"):
        sys.exit("glusterd is not installed; on Debian: apt-get install glusterfs-server")
    if subprocess.run(["gluster", "volume", "list"], capture_output=True, check=False).returncode:
        subprocess.run(["glusterd"], check=True)
        time.sleep(3)
    host = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()[0]
    folder = Path(tempfile.mkdtemp(prefix="ckpt-gluster-", dir=where))
    name, mount = f"ckpt{os.getpid()}", folder / "mount"
    mount.mkdir()
    bricks = [f"{host}:{folder}/brick{i}" for i in range(6)]
    for i in range(6):
        (folder / f"brick{i}").mkdir()
    run_gluster("volume", "create", name, "disperse", "6", "redundancy", "2", "transport", "tcp", *bricks, "force")
    try:
        run_gluster("volume", "start", name)
        time.sleep(2)
        subprocess.run(["mount", "-t", "glusterfs", f"{host}:/{name}", str(mount)], check=True)
        yield mount, name
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=False)
        run_gluster("volume", "stop", name, "force")
        run_gluster("volume", "delete", name)
        shutil.rmtree(folder, ignore_errors=True)


def drop_page_cache() -> None:
    """Drop the page cache, if this user may do that."""
    os.sync()
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE / "out", help="a folder on the disk to measure")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "out")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    count = max(4, round(args.gib * (1 << 30) / FILE_BYTES))
    source = np.random.default_rng(0).integers(0, 255, FILE_BYTES, np.uint8)
    total = count * FILE_BYTES / 1e9
    buffers = [np.empty(FILE_BYTES, np.uint8) for _ in range(4)]

    with gluster(args.data) as (mount, volume), nodes(6, args.data) as started, ThreadPoolExecutor(4) as pool:
        space = namespace(started, "4+2")

        def put_theirs(name: str) -> None:
            out = os.open(mount / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for start in range(0, FILE_BYTES, CHUNK):
                os.write(out, source[start : start + CHUNK])
            os.fsync(out)
            os.close(out)

        def get_theirs(name: str, into: np.ndarray) -> None:
            with open(mount / name, "rb", buffering=0) as file:
                done = 0
                while got := file.readinto(memoryview(into)[done : done + CHUNK]):
                    done += got
            assert done == FILE_BYTES

        def get_ours(name: str, into: np.ndarray) -> None:
            with space.open(name) as reader:
                for start in range(0, FILE_BYTES, CHUNK):
                    reader.read_into(start, memoryview(into)[start : start + CHUNK])

        def puts(put: Callable[[str], object], names: list[str]) -> float:
            return total / timed(lambda: list(pool.map(put, names)))

        def gets(get: Callable[[str, np.ndarray], None], names: list[str]) -> float:
            def get_some(thread: int) -> None:
                for name in names[thread::4]:
                    get(name, buffers[thread])

            drop_page_cache()
            seconds = timed(lambda: list(pool.map(get_some, range(4))))
            assert all(np.array_equal(buffer, source) for buffer in buffers)
            return total / seconds

        figures: dict[str, list[float]] = {}
        for number in range(args.rounds + 1):  # the first round is a warm-up
            names = [f"{number}-{i}" for i in range(count)]
            rates = {
                "GlusterFS, write": puts(put_theirs, names),
                "ckpt, write": puts(lambda name: space.put(name, source), names),
                "GlusterFS, read": gets(get_theirs, names),
                "ckpt, read": gets(get_ours, names),
            }
            if number:
                for name, value in rates.items():
                    figures.setdefault(name, []).append(value)
                space.delete(names)
                for name in names:
                    (mount / name).unlink()
        for node in started[:2]:
            node.process.kill()
            node.process.wait()
        for line in run_gluster("volume", "status", volume).splitlines():
            words = line.split()
            if words[:1] == ["Brick"] and words[1].endswith(("brick0", "brick1")):
                os.kill(int(words[-1]), signal.SIGKILL)
        time.sleep(2)
        names = [f"0-{i}" for i in range(count)]
        for _ in range(args.rounds):
            figures.setdefault("GlusterFS, read, two of six killed", []).append(gets(get_theirs, names))
            figures.setdefault("ckpt, read, two of six killed", []).append(gets(get_ours, names))
        for name, values in figures.items():
            print_row(f"4+2 on one disk, {name}", median(values), "GB/s")
        for name in ("write", "read", "read, two of six killed"):
            ratio = median(figures[f"ckpt, {name}"]) / median(figures[f"GlusterFS, {name}"])
            print_row(f"ckpt / GlusterFS, {name}", ratio, "x")
    (args.out / "gluster.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
