"""The namespace as a filesystem: fsspec's own suites, and real clients that know nothing of it."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster import three_nodes
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

from ckpt.aggregator.filesystem import CkptFileSystem
from ckpt.storage.testing import pattern


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Three nodes, as they stand in a URL."""
    with three_nodes(tmp_path_factory.mktemp("nodes")) as found:
        yield found


@pytest.fixture
def filesystem(address: str) -> Iterator[CkptFileSystem]:
    """Empty again after each test."""
    made = fsspec.filesystem("ckpt", members=address)
    yield made
    made.namespace.delete(list(made.namespace.list()))


class Fixtures(AbstractFixtures):
    @pytest.fixture(scope="class")
    def fs(self, address: str) -> CkptFileSystem:
        return CkptFileSystem(members=address)

    @pytest.fixture
    def fs_path(self, fs: CkptFileSystem) -> Iterator[str]:
        yield "tests"
        fs.namespace.delete(list(fs.namespace.list()))


class TestCopy(AbstractCopyTests, Fixtures):
    pass


class TestGet(AbstractGetTests, Fixtures):
    pass


class TestPut(AbstractPutTests, Fixtures):
    pass


class TestPipe(AbstractPipeTests, Fixtures):
    pass


class TestOpen(AbstractOpenTests, Fixtures):
    pass


# --- every method that users expect ----------------------------------------------------------------------------


def test_a_url_is_all_it_needs(address: str, filesystem: CkptFileSystem) -> None:
    url = f"ckpt://{address}/a/b.txt"
    with fsspec.open(url, "w") as file:
        file.write("hello")
    with fsspec.open(url) as file:
        assert file.read() == b"hello"
    found, path = fsspec.core.url_to_fs(f"{url}?redundancy=1x")
    assert path == "a/b.txt"
    assert found.cat(path) == b"hello"
    assert found.unstrip_protocol("a/b.txt") == url
    assert fsspec.core.url_to_fs(url)[0] is filesystem


def test_looking(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    for path, data in {"r/a": b"1", "r/b/c": b"22", "r/b/d/e.txt": b"333", "x": b""}.items():
        fs.pipe(path, data)
    assert fs.ls("r", detail=False) == ["r/a", "r/b"]
    assert [(i["name"], i["type"], i["size"]) for i in fs.ls("r")] == [("r/a", "file", 1), ("r/b", "directory", 0)]
    assert fs.ls("", detail=False) == ["r", "x"]
    assert fs.find("r") == ["r/a", "r/b/c", "r/b/d/e.txt"]
    assert fs.find("r", withdirs=True) == ["r", "r/a", "r/b", "r/b/c", "r/b/d", "r/b/d/e.txt"]
    assert fs.find("r", maxdepth=1) == ["r/a"]
    assert fs.glob("r/**/*.txt") == ["r/b/d/e.txt"]
    assert fs.glob("r/*") == ["r/a", "r/b"]
    assert [(root, sorted(d), sorted(f)) for root, d, f in fs.walk("r")] == [
        ("r", ["b"], ["a"]), ("r/b", ["d"], ["c"]), ("r/b/d", [], ["e.txt"]),
    ]  # fmt: skip
    assert fs.du("r") == 6
    assert fs.exists("r/b")
    assert fs.isdir("r/b")
    assert fs.isfile("r/b/c")
    assert not fs.exists("none")
    assert fs.info("r/b/c")["size"] == 2
    with pytest.raises(FileNotFoundError):
        fs.info("none")
    with pytest.raises(FileNotFoundError):
        fs.ls("none")


def test_times_and_sums(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    fs.pipe("a", b"1")
    first = fs.checksum("a")
    created = fs.created("a")
    assert abs(datetime.now(UTC) - created) < timedelta(minutes=5)
    fs.pipe("a", b"2")
    assert fs.checksum("a") != first
    assert fs.created("a") == created
    assert fs.modified("a") > created


def test_moving(filesystem: CkptFileSystem, tmp_path: Path) -> None:
    fs = filesystem
    data = pattern(9_000_000)
    fs.pipe("a/big", data)
    fs.cp("a/big", "b/copy")
    fs.mv("a/big", "c/moved")
    assert fs.cat("b/copy") == fs.cat("c/moved") == data
    assert fs.find("") == ["b/copy", "c/moved"]
    fs.get("c/moved", str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == data
    fs.put(str(tmp_path / "x"), "back")
    assert fs.cat("back") == data
    parts = fs.cat_ranges(["back"] * 3, [0, 4_000_000, -5], [3, 4_000_010, None])
    assert parts == [data[:3], data[4_000_000:4_000_010], data[-5:]]
    assert fs.cat_file("back", start=-10, end=-3) == data[-10:-3]
    fs.rm("b", recursive=True)
    assert not fs.exists("b")
    with pytest.raises(FileNotFoundError):
        fs.rm("none")


def test_folders(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    fs.mkdir("empty")
    assert fs.isdir("empty")
    assert fs.ls("empty") == []
    with pytest.raises(FileExistsError):
        fs.mkdir("empty")
    fs.makedirs("empty", exist_ok=True)
    with pytest.raises(FileExistsError):
        fs.makedirs("empty")
    fs.pipe("empty/a", b"")
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir("empty")
    with pytest.raises((IsADirectoryError, OSError)):
        fs.rm("empty")
    fs.rm("empty/a")
    fs.rmdir("empty")
    assert not fs.exists("empty")
    fs.touch("t")
    fs.pipe("t", b"1")
    fs.touch("t", truncate=False)
    assert fs.cat("t") == b"1"
    fs.touch("t")
    assert fs.cat("t") == b""


def test_open_files(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    data = pattern(13_000_001)
    with fs.open("a", "wb") as file:
        for start in range(0, len(data), 777_777):
            file.write(data[start : start + 777_777])
        assert not fs.exists("a"), "it is not there before it is closed"
    with fs.open("a") as file:
        assert file.size == len(data)
        file.seek(12_000_000)
        assert file.read(100) == data[12_000_000:12_000_100]
        file.seek(0)
        assert file.read() == data
    for n in (10, 100_000):
        with fs.open(f"log{n}", "wb") as file:
            file.write(b"x" * n)
        for _ in range(3):
            with fs.open(f"log{n}", "ab") as file:
                assert file.tell() in (n, n + 5, n + 10)
                file.write(b"hello")
        assert fs.cat(f"log{n}") == b"x" * n + b"hello" * 3
    with fs.open("new", "ab") as file:
        file.write(b"1")
    with pytest.raises(FileExistsError), fs.open("new", "xb") as file:
        file.write(b"2")
    assert fs.cat("new") == b"1"
    with pytest.raises(ValueError, match="rb, wb, ab or xb"):
        fs.open("new", "r+b")
    with pytest.raises(FileNotFoundError):
        fs.open("none")
    with pytest.raises(ValueError, match="can't name a file"):
        fs.pipe("a/../b", b"")


def test_transactions(filesystem: CkptFileSystem) -> None:
    fs = filesystem
    with fs.transaction, fs.open("a", "wb") as file:
        file.write(b"1" * 100_000)
    assert fs.cat("a") == b"1" * 100_000

    class Stop(Exception):
        pass

    with pytest.raises(Stop), fs.transaction:
        with fs.open("b", "wb") as file:
            file.write(b"1" * 100_000)
        raise Stop
    assert not fs.exists("b")


# --- clients ---------------------------------------------------------------------------------------------------


def test_zarr(filesystem: CkptFileSystem, address: str) -> None:
    import zarr

    data = np.random.default_rng(0).standard_normal((300, 400))
    array = zarr.create_array(f"ckpt://{address}/z/a.zarr", shape=data.shape, chunks=(100, 100), dtype=data.dtype)
    array[:] = data
    again = zarr.open_array(f"ckpt://{address}/z/a.zarr", mode="r")
    assert np.array_equal(again[50:250, 1::7], data[50:250, 1::7])


def test_h5py(filesystem: CkptFileSystem) -> None:
    import h5py

    data = np.arange(500_000.0)
    whole = io.BytesIO()
    with h5py.File(whole, "w") as file:
        file["x/y"] = data
    filesystem.pipe("a.h5", whole.getvalue())
    with filesystem.open("a.h5") as opened, h5py.File(opened, "r") as file:
        assert np.array_equal(file["x/y"][1000:2000], data[1000:2000])


def test_parquet(filesystem: CkptFileSystem) -> None:
    table = pa.table({"a": np.arange(100_000), "b": [f"row {i}" for i in range(100_000)]})
    pq.write_table(table, "t/x.parquet", filesystem=filesystem)
    assert pq.read_table("t/x.parquet", filesystem=filesystem).equals(table)
    assert pq.read_table("t/x.parquet", columns=["a"], filesystem=filesystem).num_columns == 1


def test_torch_dcp(filesystem: CkptFileSystem, address: str) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    state: dict[str, Any] = {"w": torch.randn(1000, 500), "n": torch.arange(10)}
    url = f"ckpt://{address}/dcp/1"
    dcp.save(state, storage_writer=FsspecWriter(url))
    into: dict[str, Any] = {"w": torch.zeros(1000, 500), "n": torch.zeros(10, dtype=torch.int64)}
    dcp.load(into, storage_reader=FsspecReader(url))
    assert all(torch.equal(state[k], into[k]) for k in state)


def test_pandas(filesystem: CkptFileSystem, address: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": range(1000), "b": [f"row {i}" for i in range(1000)]})
    frame.to_parquet(f"ckpt://{address}/p/x.parquet")
    assert pandas.read_parquet(f"ckpt://{address}/p/x.parquet").equals(frame)


def test_the_example(tmp_path: Path) -> None:
    example = Path(__file__).parents[1] / "examples" / "cluster.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "equal to what was saved: True" in done.stdout
    assert "all whole" in done.stdout.splitlines()[-1]
