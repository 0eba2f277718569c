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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import numpy as np
from nodes import Node, namespace, nodes, print_row, rows, timed

from ckpt.aggregator.file_io.namespace import Namespace

HERE = Path(__file__).resolve().parent
FILE_BYTES = 128 << 20
CHUNK = 8 << 20
DEGRADED_READ = "read, two of six killed"


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


class MountedFiles:
    """Files below the mount point of GlusterFS, all with the same content."""

    def __init__(self, mount: Path, source: np.ndarray) -> None:
        self._mount, self._source = mount, source

    def put(self, name: str) -> None:
        """Write a file, and make it durable."""
        out = os.open(self._mount / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for start in range(0, FILE_BYTES, CHUNK):
            os.write(out, self._source[start : start + CHUNK])
        os.fsync(out)
        os.close(out)

    def get(self, name: str, into: np.ndarray) -> None:
        """Read a file."""
        with open(self._mount / name, "rb", buffering=0) as file:
            done = 0
            while got := file.readinto(memoryview(into)[done : done + CHUNK]):
                done += got
        assert done == FILE_BYTES

    def delete(self, names: list[str]) -> None:
        """Delete files."""
        for name in names:
            (self._mount / name).unlink()


class NamespaceFiles:
    """Files of the namespace, all with the same content."""

    def __init__(self, space: Namespace, source: np.ndarray) -> None:
        self._space, self._source = space, source

    def put(self, name: str) -> None:
        """Write a file; it is durable then."""
        self._space.put(name, self._source)

    def get(self, name: str, into: np.ndarray) -> None:
        """Read a file."""
        with self._space.open(name) as reader:
            for start in range(0, FILE_BYTES, CHUNK):
                reader.read_into(start, memoryview(into)[start : start + CHUNK])

    def delete(self, names: list[str]) -> None:
        """Delete files."""
        self._space.delete(names)


Files = MountedFiles | NamespaceFiles


class Clients:
    """The four threads of a pool, which write and read files at a rate in GB/s. count: the number of files of a round."""

    def __init__(self, pool: ThreadPoolExecutor, count: int, source: np.ndarray) -> None:
        self._pool, self._count, self._source = pool, count, source
        self._total = count * FILE_BYTES / 1e9
        self._buffers = [np.empty(FILE_BYTES, np.uint8) for _ in range(4)]

    def names(self, number: int) -> list[str]:
        """Return the names of the files of a round."""
        return [f"{number}-{i}" for i in range(self._count)]

    def put(self, files: Files, number: int) -> float:
        """Write the files of a round."""
        names = self.names(number)
        return self._total / timed(lambda: list(self._pool.map(files.put, names)))

    def get(self, files: Files, number: int) -> float:
        """Read the files of a round, and check what the last ones contain."""
        names = self.names(number)

        def get_some(thread: int) -> None:
            for name in names[thread::4]:
                files.get(name, self._buffers[thread])

        drop_page_cache()
        seconds = timed(lambda: list(self._pool.map(get_some, range(4))))
        assert all(np.array_equal(buffer, self._source) for buffer in self._buffers)
        return self._total / seconds


def measure(systems: dict[str, Files], clients: Clients, rounds: int) -> dict[str, list[float]]:
    """Return the rates of all rounds. One round before them is a warm-up, and its files stay."""
    figures: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        rates = {f"{system}, write": clients.put(files, number) for system, files in systems.items()}
        rates |= {f"{system}, read": clients.get(files, number) for system, files in systems.items()}
        if number:
            for name, value in rates.items():
                figures.setdefault(name, []).append(value)
            for files in systems.values():
                files.delete(clients.names(number))
    return figures


def kill_two(started: list[Node], volume: str) -> None:
    """Kill two of the nodes and two of the bricks."""
    for node in started[:2]:
        node.process.kill()
        node.process.wait()
    for line in run_gluster("volume", "status", volume).splitlines():
        words = line.split()
        if words[:1] == ["Brick"] and words[1].endswith(("brick0", "brick1")):
            os.kill(int(words[-1]), signal.SIGKILL)
    time.sleep(2)


def print_figures(figures: dict[str, list[float]]) -> None:
    """Print the median of each figure, and the ratio of both systems."""
    for name, values in figures.items():
        print_row(f"4+2 on one disk, {name}", median(values), "GB/s")
    for name in ("write", "read", DEGRADED_READ):
        ratio = median(figures[f"ckpt, {name}"]) / median(figures[f"GlusterFS, {name}"])
        print_row(f"ckpt / GlusterFS, {name}", ratio, "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE / "out", help="a folder on the disk to measure")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "out")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    source = np.random.default_rng(0).integers(0, 255, FILE_BYTES, np.uint8)
    count = max(4, round(args.gib * (1 << 30) / FILE_BYTES))

    with gluster(args.data) as (mount, volume), nodes(6, args.data) as started, ThreadPoolExecutor(4) as pool:
        clients = Clients(pool, count, source)
        systems = {
            "GlusterFS": MountedFiles(mount, source),
            "ckpt": NamespaceFiles(namespace(started, "4+2"), source),
        }
        figures = measure(systems, clients, args.rounds)
        kill_two(started, volume)
        for _ in range(args.rounds):
            for system, files in systems.items():
                figures.setdefault(f"{system}, {DEGRADED_READ}", []).append(clients.get(files, 0))
        print_figures(figures)
    (args.out / "gluster.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
