"""The namespace beside GlusterFS: six nodes or bricks on one disk, 4+2 in both, in alternating rounds of one run.

    apt-get install glusterfs-server            # Debian's; this needs root, FUSE and an address that is not loopback
    python benchmarks/gluster.py [--data DIR] [--gib 1] [--rounds 3]

Files of 128 MiB, four at a time, each durable before the next: through GlusterFS's mount with fsync, and through the
namespace's own client. Reads begin with an empty page cache, where the system lets us drop it. At the end two of six are
killed in both.
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
from nodes import namespace, nodes, rows, say, timed

HERE = Path(__file__).resolve().parent
FILE_BYTES = 128 << 20
CHUNK = 8 << 20


def tell(*words: str) -> str:
    done = subprocess.run(["gluster", "--mode=script", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"gluster {' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def gluster(where: Path) -> Iterator[tuple[Path, str]]:
    """A mounted volume of six bricks, and its name."""
    if not shutil.which("glusterd"):
        sys.exit("glusterd is not here; on Debian: apt-get install glusterfs-server")
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
    tell("volume", "create", name, "disperse", "6", "redundancy", "2", "transport", "tcp", *bricks, "force")
    try:
        tell("volume", "start", name)
        time.sleep(2)
        subprocess.run(["mount", "-t", "glusterfs", f"{host}:/{name}", str(mount)], check=True)
        yield mount, name
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=False)
        tell("volume", "stop", name, "force")
        tell("volume", "delete", name)
        shutil.rmtree(folder, ignore_errors=True)


def forget_pages() -> None:
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
    places = [np.empty(FILE_BYTES, np.uint8) for _ in range(4)]

    with gluster(args.data) as (mount, volume), nodes(6, args.data) as made, ThreadPoolExecutor(4) as pool:
        space = namespace(made, "4+2")

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
            def some(turn: int) -> None:
                for name in names[turn::4]:
                    get(name, places[turn])

            forget_pages()
            seconds = timed(lambda: list(pool.map(some, range(4))))
            assert all(np.array_equal(place, source) for place in places)
            return total / seconds

        figures: dict[str, list[float]] = {}
        for turn in range(args.rounds + 1):  # the first one warms up
            names = [f"{turn}-{i}" for i in range(count)]
            here = {
                "GlusterFS, write": puts(put_theirs, names),
                "ckpt, write": puts(lambda name: space.put(name, source), names),
                "GlusterFS, read": gets(get_theirs, names),
                "ckpt, read": gets(get_ours, names),
            }
            if turn:
                for what, value in here.items():
                    figures.setdefault(what, []).append(value)
                space.delete(names)
                for name in names:
                    (mount / name).unlink()
        for node in made[:2]:
            node.process.kill()
            node.process.wait()
        for line in tell("volume", "status", volume).splitlines():
            words = line.split()
            if words[:1] == ["Brick"] and words[1].endswith(("brick0", "brick1")):
                os.kill(int(words[-1]), signal.SIGKILL)
        time.sleep(2)
        names = [f"0-{i}" for i in range(count)]
        for _ in range(args.rounds):
            figures.setdefault("GlusterFS, read, two of six killed", []).append(gets(get_theirs, names))
            figures.setdefault("ckpt, read, two of six killed", []).append(gets(get_ours, names))
        for what, values in figures.items():
            say(f"4+2 on one disk, {what}", median(values), "GB/s")
        for what in ("write", "read", "read, two of six killed"):
            ratio = median(figures[f"ckpt, {what}"]) / median(figures[f"GlusterFS, {what}"])
            say(f"ckpt / GlusterFS, {what}", ratio, "x")
    (args.out / "gluster.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
