"""zarr, h5py, parquet, torch and pandas on the namespace, through fsspec only."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.filesystems import address as address
from helpers.filesystems import filesystem as filesystem
from helpers.folders import EXAMPLES

from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem


def test_zarr_arrays_are_read_back(filesystem: CkptFileSystem, address: str) -> None:
    import zarr

    data = np.random.default_rng(0).standard_normal((300, 400))
    array = zarr.create_array(f"ckpt://{address}/z/a.zarr", shape=data.shape, chunks=(100, 100), dtype=data.dtype)
    array[:] = data
    again = zarr.open_array(f"ckpt://{address}/z/a.zarr", mode="r")
    assert np.array_equal(again[50:250, 1::7], data[50:250, 1::7])


def test_hdf5_files_are_read_back(filesystem: CkptFileSystem) -> None:
    import h5py

    data = np.arange(500_000.0)
    whole = io.BytesIO()
    with h5py.File(whole, "w") as file:
        file["x/y"] = data
    filesystem.pipe("a.h5", whole.getvalue())
    with filesystem.open("a.h5") as opened, h5py.File(opened, "r") as file:
        assert np.array_equal(file["x/y"][1000:2000], data[1000:2000])


def test_parquet_data_sets_are_read_back(filesystem: CkptFileSystem) -> None:
    table = pa.table({"a": np.arange(100_000), "b": [f"row {i}" for i in range(100_000)]})
    pq.write_table(table, "t/x.parquet", filesystem=filesystem)
    assert pq.read_table("t/x.parquet", filesystem=filesystem).equals(table)
    assert pq.read_table("t/x.parquet", columns=["a"], filesystem=filesystem).num_columns == 1


def test_torch_dcp_checkpoints_are_read_back(filesystem: CkptFileSystem, address: str) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    state: dict[str, Any] = {"w": torch.randn(1000, 500), "n": torch.arange(10)}
    url = f"ckpt://{address}/dcp/1"
    dcp.save(state, storage_writer=FsspecWriter(url))
    into: dict[str, Any] = {"w": torch.zeros(1000, 500), "n": torch.zeros(10, dtype=torch.int64)}
    dcp.load(into, storage_reader=FsspecReader(url))
    assert all(torch.equal(state[k], into[k]) for k in state)


def test_pandas_frames_are_read_back(filesystem: CkptFileSystem, address: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": range(1000), "b": [f"row {i}" for i in range(1000)]})
    frame.to_parquet(f"ckpt://{address}/p/x.parquet")
    assert pandas.read_parquet(f"ckpt://{address}/p/x.parquet").equals(frame)


def test_the_example_of_the_libraries_runs(tmp_path: Path) -> None:
    example = EXAMPLES / "cluster.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "equal to what was saved: True" in done.stdout
    assert "all whole" in done.stdout.splitlines()[-1]
