"""Compares storage nodes and their namespace with bare Arrow Flight and the disk, in one run on one machine.

    python benchmarks/nodes.py                  all rows
    python benchmarks/nodes.py --only code small

Nodes and client share the cores, and in some rows one disk, so the figures are ratios within the run. Nodes are processes, with
data on tmpfs (/dev/shm) or on disk (--data). Client and nodes are on one host, so the client reads and writes through passed
descriptors. In "wire" rows, nodes run with --no-fd-passing, and the bytes go through Arrow Flight.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import psutil

HERE = Path(__file__).resolve().parent
FILE_BYTES = 64 << 20
PIECE_BYTES = 8 << 20
SAVES = 6

rows: list[tuple[str, float, str]] = []


def print_row(name: str, value: float, unit: str) -> float:
    """Print and record a figure, and return its value."""
    rows.append((name, value, unit))
    print(f"{name:72} {value:10.2f} {unit}", flush=True)
    return value


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Node:
    """A node in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        listen = ["--listen", "127.0.0.1:0", "--monitor", "127.0.0.1:0"]
        command = [sys.executable, "-m", "ckpt.tools.node", "--data", str(folder), *listen, *options]
        self.folder = folder
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r" at 127\.0\.0\.1:(\d+) \(metrics at 127\.0\.0\.1:(\d+)\)", line):
                self.address, self.monitor = f"127.0.0.1:{found[1]}", found[2]
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def received(self) -> float:
        """Return the bytes of objects that the node got, over the wire and through descriptors."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.monitor}/metrics") as answer:
            found = re.findall(r'ckpt_node_bytes_(?:received|near)_total\{verb="put"\} (\S+)', answer.read().decode())
        return sum(map(float, found))


@contextmanager
def nodes(count: int, where: Path, *options: str) -> Iterator[list[Node]]:
    """A context with running nodes, each with a folder below `where`."""
    folder = Path(tempfile.mkdtemp(prefix="ckpt-nodes-", dir=where))
    started = [Node(folder / str(i), *options) for i in range(count)]
    try:
        yield started
    finally:
        for node in started:
            node.process.kill()
            node.process.wait()
        shutil.rmtree(folder)


def namespace(started: list[Node], redundancy: str):
    """Return the namespace of nodes."""
    from ckpt.aggregator.cluster.config import config_from_table
    from ckpt.aggregator.file_io.namespace import Namespace

    return Namespace(config_from_table("bench", {"members": [n.address for n in started], "redundancy": redundancy}, "bench"))


# --- bare Flight -----------------------------------------------------------------------------------------------

BARE = """
import os, sys, pyarrow as pa, pyarrow.flight as f
data = pa.RecordBatch.from_arrays([pa.Array.from_buffers(pa.uint8(), 8 << 20, [None, pa.allocate_buffer(8 << 20)])], ["data"])
class Server(f.FlightServerBase):
    def do_put(self, context, descriptor, reader, writer):
        out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if len(sys.argv) > 1 else None
        for chunk in reader:
            if out is not None: os.write(out, chunk.data.column(0).buffers()[1])
        if out is not None: os.close(out)
        writer.write(pa.py_buffer(b"done"))
    def do_get(self, context, ticket):
        return f.GeneratorStream(data.schema, (data for _ in range(int(ticket.ticket) // (8 << 20))))
s = Server("grpc+tcp://127.0.0.1:0"); print(s.port, flush=True); s.serve()
"""


def bare(streams: int, files: int, *store: str) -> tuple[float, float]:
    """Return GB/s of put and get by a Flight server that discards the bytes, or only writes them to a file.

    store: the path of that file, if any.
    """
    import pyarrow as pa
    import pyarrow.flight as flight

    server = subprocess.Popen([sys.executable, "-c", BARE, *store], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    clients = [flight.FlightClient(f"grpc+tcp://127.0.0.1:{port}", generic_options=[("x", i)]) for i in range(streams)]
    schema = pa.schema([("data", pa.uint8())])
    source = np.random.default_rng(0).integers(0, 255, PIECE_BYTES, np.uint8)
    batch = pa.RecordBatch.from_arrays([pa.array(source)], schema=schema)
    target = [np.empty(PIECE_BYTES, np.uint8) for _ in range(streams)]

    def put(i: int) -> None:
        writer, reader = clients[i % streams].do_put(flight.FlightDescriptor.for_command(b"x"), schema)
        for _ in range(FILE_BYTES // PIECE_BYTES):
            writer.write_batch(batch)
        writer.done_writing()
        reader.read()
        writer.close()

    def get(i: int) -> None:
        for chunk in clients[i % streams].do_get(flight.Ticket(str(FILE_BYTES).encode())):
            target[i % streams][:] = chunk.data.column(0).to_numpy()

    found = []
    for work in (put, get):
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(work, range(streams)))
            seconds = [timed(lambda w=work: list(pool.map(w, range(files)))) for _ in range(3)]
            found.append(files * FILE_BYTES / 1e9 / median(seconds))
    server.kill()
    server.wait()
    return found[0], found[1]


def one_node(args: argparse.Namespace) -> None:
    """Measure 64 MiB files, two at a time, through one node on tmpfs, and bare Flight with two streams.

    The node is used through descriptors and over the wire.
    """
    from ckpt.storage.node.client import NodeStore

    files, streams = 16, 2
    data = memoryview(np.random.default_rng(0).integers(0, 255, FILE_BYTES, np.uint8))
    buffers = [memoryview(bytearray(FILE_BYTES)) for _ in range(streams)]

    def put(store: NodeStore, i: int) -> None:
        with store.create(f"f{i}", FILE_BYTES) as writer:
            for start in range(0, FILE_BYTES, PIECE_BYTES):
                writer.append(data[start : start + PIECE_BYTES])
            writer.commit()

    def get(store: NodeStore, i: int) -> None:
        with store.open(f"f{i}") as reader:
            reader.read_into(0, buffers[i % streams])

    found: dict[str, list[float]] = {}
    with (
        nodes(1, args.memory) as (near,),
        nodes(1, args.memory, "--no-fd-passing") as (far,),
        ThreadPoolExecutor(streams) as pool,
    ):
        for _ in range(3):
            rates = dict(zip(("bare put", "bare get"), bare(streams, files), strict=True))
            rates["storing"] = bare(1, files // 2, str(args.memory / "ckpt-bare"))[0]
            (args.memory / "ckpt-bare").unlink()
            for path, node in (("near", near), ("wire", far)):
                store = NodeStore(node.address)
                for work in (put, get):
                    seconds = timed(lambda w=work, s=store: list(pool.map(lambda i: w(s, i), range(files))))
                    rates[f"{path} {work.__name__}"] = files * FILE_BYTES / 1e9 / seconds
            for name, rate in rates.items():
                found.setdefault(name, []).append(rate)
    rates = {name: median(each) for name, each in found.items()}
    print_row("bare Flight, put of 64 MiB, 2 streams", rates["bare put"], "GB/s")
    print_row("bare Flight, get", rates["bare get"], "GB/s")
    print_row("bare Flight that writes into a file on tmpfs, put, 1 stream", rates["storing"], "GB/s")
    for path, title in (("near", "one node on tmpfs"), ("wire", "over the wire, one node on tmpfs")):
        print_row(f"{title}, put of 64 MiB files, 2 at a time", rates[f"{path} put"], "GB/s")
        print_row(f"{title}, get", rates[f"{path} get"], "GB/s")
        goal = " (to reach 0.8)" if path == "near" else ", over the wire"
        print_row(f"put / bare Flight{goal}", rates[f"{path} put"] / rates["bare put"], "x")
        print_row(f"get / bare Flight{goal}", rates[f"{path} get"] / rates["bare get"], "x")


def save_rate(started: list[Node], redundancy: str, nbytes: int, **options: int) -> float:
    """Return GB/s of saves of a state with `nbytes` bytes to a namespace. options: those of `ckpt.save`."""
    import ckpt

    names = ",".join(n.address for n in started)
    state = {f"w{i}": np.random.default_rng(i).integers(0, 255, 64 << 20, np.uint8) for i in range(nbytes >> 26)}
    rates, busy = [], []
    for step in range(SAVES):
        url = f"ckpt://{names}/run?redundancy={redundancy}"
        psutil.cpu_percent()
        rates.append(nbytes / 1e9 / timed(lambda s=step, u=url: ckpt.save(state, u, s, codec="none", **options)))
        busy.append(psutil.cpu_percent())
        for value in state.values():
            value += 1
    print_row(f"cores in use during saves to {len(started)} nodes", median(busy[1:]), "%")
    return median(rates[1:])


def scaling(args: argparse.Namespace) -> None:
    """Measure saves to one node and to four."""
    with nodes(1, args.memory) as one:
        single = print_row("save of 1 GiB, one node on tmpfs, 1x", save_rate(one, "1x", 1 << 30, keep=1), "GB/s")
    with nodes(4, args.memory) as four:
        four_rate = print_row("save of 1 GiB, four nodes on tmpfs, 1x", save_rate(four, "1x", 1 << 30, keep=1), "GB/s")
    print_row("four nodes / one node (to reach 1.5, until cores are full)", four_rate / single, "x")


def write_limit(folder: Path, source: np.ndarray) -> float:
    """Return GB/s of O_DIRECT writes by one thread."""
    import limits

    found: dict[str, list[float]] = {}

    def record(name: str, moved: int, task: Callable[[], None], before: Callable[[], None] = lambda: None) -> None:
        found.setdefault(name, []).extend(moved / 1e9 / limits.seconds(task, before) for _ in range(3))

    limits.write_limits(record, source, folder / "limit.bin")
    (folder / "limit.bin").unlink()
    return print_row("O_DIRECT write, 1 thread", median(found[limits.WRITE_1]), "GB/s")


def one_disk(args: argparse.Namespace) -> None:
    """Measure saves to four nodes on one disk, and the bytes that they get."""
    limit = write_limit(args.data, np.random.default_rng(0).integers(0, 255, 1 << 30, np.uint8))
    with nodes(4, args.data) as started:
        before = sum(n.received() for n in started)
        rate = print_row("save of 1 GiB, four nodes on one disk, 2x", save_rate(started, "2x", 1 << 30), "GB/s")
        moved = sum(n.received() for n in started) - before
    print_row("2x on one disk / O_DIRECT limit (to reach 0.45)", rate / limit, "x")
    print_row("bytes that the nodes got / (2 x payload) (at most 1.02)", moved / (SAVES * 2 * (1 << 30)), "x")


def code(args: argparse.Namespace) -> None:
    """Measure the erasure code, and reads with all nodes and with two nodes dead."""
    from ckpt.aggregator.placement import erasure

    shares = [np.random.default_rng(i).integers(0, 255, 2 << 20, np.uint8) for i in range(4)]
    parity = [np.zeros(2 << 20, np.uint8) for _ in range(2)]
    coder = erasure.erasure_code(4, 2)
    coder.encode(shares, parity)
    rates = [8 * PIECE_BYTES / 1e9 / timed(lambda: [coder.encode(shares, parity) for _ in range(8)]) for _ in range(9)]
    print_row("4+2 encode, one core, 8 MiB pieces, buffers reused (to reach 5)", median(rates), "GB/s")

    def into_new() -> None:
        for _ in range(8):
            coder.encode(shares, [np.zeros(2 << 20, np.uint8) for _ in range(2)])

    fresh = [8 * PIECE_BYTES / 1e9 / timed(into_new) for _ in range(9)]
    print_row("4+2 encode into new buffers", median(fresh), "GB/s")
    with nodes(6, args.memory) as started:
        space = namespace(started, "4+2")
        data = np.random.default_rng(0).integers(0, 255, 512 << 20, np.uint8)
        space.put("big", memoryview(data))
        into = np.empty_like(data)

        def read() -> None:
            with space.open("big") as reader:

                def part(i: int) -> None:
                    at = slice(i * PIECE_BYTES, (i + 1) * PIECE_BYTES)
                    reader.read_into(at.start, memoryview(into[at]))

                with ThreadPoolExecutor(3) as pool:
                    list(pool.map(part, range(len(data) // PIECE_BYTES)))

        read()
        healthy = print_row("4+2 on six nodes, read", median(len(data) / 1e9 / timed(read) for _ in range(5)), "GB/s")
        for node in started[:2]:
            node.process.kill()
            node.process.wait()
        read()
        assert np.array_equal(into, data)
        degraded = print_row("4+2 with two nodes dead, read", median(len(data) / 1e9 / timed(read) for _ in range(5)), "GB/s")
        print_row("degraded / healthy read (to reach 0.5)", degraded / healthy, "x")


def small(args: argparse.Namespace) -> None:
    """Measure operations on many small files."""
    count = args.files
    with nodes(4, args.data) as started:
        space = namespace(started, "2x")
        paths = [f"d{i // 1000}/f{i}" for i in range(count)]
        with ThreadPoolExecutor(16) as pool:
            seconds = timed(lambda: list(pool.map(lambda p: space.put(p, b"x" * 100), paths)))
        print_row(f"{count:,} small files, 2x, four nodes: put, one by one, 16 at a time", count / seconds, "a second")
        print_row("list", count / timed(space.list), "a second")
        print_row("stat, together", count / timed(lambda: space.stat_all(paths)), "a second")
        print_row("stat, one by one", 2000 / timed(lambda: [space.stat(p) for p in paths[:2000]]), "a second")
        print_row("delete, together", count / timed(lambda: space.delete(paths)), "a second")


def repair(args: argparse.Namespace) -> None:
    """Measure the repair of a lost disk."""
    from ckpt.aggregator.maintenance.repair import repair_namespace
    from ckpt.aggregator.maintenance.scrub import scrub_namespace

    data = np.random.default_rng(0).integers(0, 255, 1 << 30, np.uint8)
    limit = write_limit(args.data, data)
    with nodes(4, args.data) as started:
        space = namespace(started, "2x")
        for i in range(8):
            space.put(f"f{i}", memoryview(data)[i << 27 : (i + 1) << 27])
        for path in (started[0].folder / "objects").rglob("*"):
            if path.is_file():
                path.unlink()
        found = scrub_namespace(space)
        began = time.perf_counter()
        done = repair_namespace(space, found)
        rate = print_row(
            "repair of a lost disk, four nodes on one disk", done.nbytes / 1e9 / (time.perf_counter() - began), "GB/s"
        )
        print_row("repair / O_DIRECT limit (to reach 0.5)", rate / limit, "x")
        assert not done.failed


TASKS = {"one": one_node, "scaling": scaling, "disk": one_disk, "code": code, "small": small, "repair": repair}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--data", type=Path, default=HERE / "out", help="a folder on the disk to measure")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder on tmpfs")
    parser.add_argument("--files", type=int, default=100_000, help="small files")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        TASKS[name](args)
        (args.out / "nodes.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
