"""ckpt-restore: every format is read back with its own library, bit for bit, and no failure leaves a partial file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.restored_files import ENDINGS, assert_same, assert_whole, left_in, open_npz, run
from helpers.restored_files import saved as saved
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.groups.threads import ThreadGroup
from ckpt.state.boxes import contiguous_start, whole_box
from ckpt.state.tree import flatten
from ckpt.storage.base.errors import CkptError
from ckpt.tools import step_contents
from ckpt.tools.restore import command


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_leaf_comes_back_in_every_format(ending: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, state = saved
    dest = tmp_path / f"out.{ending}"
    done = run(root, dest)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {dest}: ")
    assert "of step 3" in done.stdout
    assert "numpy.int4" in done.stderr or "more" in done.stderr
    assert_whole(dest, ending, state)
    assert left_in(tmp_path) == [dest.name]

    again = run(root, dest)
    assert again.returncode == 1
    assert "--overwrite" in again.stderr
    assert_whole(dest, ending, state)
    replaced = run(root, dest, "--overwrite", "--step", 1)
    assert replaced.returncode == 0, replaced.stderr
    assert left_in(tmp_path) == [dest.name]


@pytest.mark.parametrize("ending", ENDINGS)
def test_large_leaves_are_written_part_by_part(
    ending: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state = saved
    monkeypatch.setattr(step_contents, "PIECE_BYTES", 48)
    dest = tmp_path / f"out.{ending}"
    assert command.main([str(root), str(dest), "--step", "3"], standalone_mode=False) == 0
    assert_whole(dest, ending, state)


@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(1, 16), st.integers(1, 200))
def test_parts_tile_the_array(shape: tuple[int, ...], itemsize: int, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_contents, "PIECE_BYTES", limit)
        parts = list(step_contents.tile_boxes(shape, tuple(max(1, n) for n in step_contents.piece_shape(shape, itemsize))))
    starts = [contiguous_start(box, shape) for box in parts]
    ends = [(start or 0) + box.size for start, box in zip(starts, parts, strict=True)]
    assert starts == [0, *ends][: len(starts)]
    assert sum(box.size for box in parts) == whole_box(shape).size
    assert all(box.size * itemsize <= max(limit, itemsize) for box in parts)


def test_only_the_selected_leaves_are_restored(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, state = saved
    dest = tmp_path / "out.npz"
    assert run(root, dest, "--only", "numpy.b*", "--only", "model.head.weight", "--only", "epoch").returncode == 0
    names, read, values, tied = open_npz(dest)
    assert names == {"numpy.big", "numpy.bf16", "numpy.bytes", "numpy.bool", "model.head.weight"}
    assert_same("head", flatten(state).leaves["model.embed.weight"], *read("model.head.weight"))
    assert values == {"epoch": 3}
    assert tied == {}

    scalar = tmp_path / "scalar.npz"  # one small leaf of a block that has other leaves, too
    assert run(root, scalar, "--only", "numpy.zero_d").returncode == 0
    assert np.load(scalar)["numpy.zero_d"][()] == 3.5

    torch_file = tmp_path / "out.pt"
    assert run(root, torch_file, "--only", "numpy.big").returncode == 0
    assert list(torch.load(torch_file, weights_only=True)) == ["numpy"]

    missing = run(root, tmp_path / "none.npz", "--only", "modle.*")
    assert missing.returncode == 1
    assert "modle.*" in missing.stderr
    assert not (tmp_path / "none.npz").exists()


def test_numpy_scalars_of_a_group_are_restored(tmp_path: Path) -> None:
    """They are in the state tree: a .pt has the numbers of Python for them, and bytes of those that Python cannot express."""

    def state(rank: int) -> dict[str, Any]:
        return {"w": np.arange(4), "rate": np.float32(rank + 0.5), "day": np.datetime64("2024-01-01"), "on": np.bool_(rank)}

    ranks = [
        threading.Thread(target=ckpt.save, args=(state(g.rank), tmp_path / "run", 0), kwargs={"group": g})
        for g in ThreadGroup.make(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
    assert run(tmp_path / "run", tmp_path / "out.pt").returncode == 0
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded.pop("w").tolist() == [0, 1, 2, 3]
    assert loaded == {"rate": 0.5, "day": np.datetime64("2024-01-01").tobytes(), "on": False}
    assert run(tmp_path / "run", tmp_path / "out.npz").returncode == 0
    assert open_npz(tmp_path / "out.npz")[2]["rate"] == {"scalar": "AAAAPw==", "dtype": "float32"}


def test_a_pt_file_has_keys_that_weights_only_accepts(tmp_path: Path) -> None:
    ckpt.save({"groups": {np.str_("é"): np.ones(2), (1, "b"): 2}, np.str_(""): 3}, tmp_path / "run", step=0)
    assert run(tmp_path / "run", tmp_path / "out.pt").returncode == 0
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(loaded["groups"]) == ["é", (1, "b")]
    assert loaded[""] == 3


def test_a_state_of_one_array_is_restored(tmp_path: Path) -> None:
    ckpt.save(np.arange(5), tmp_path / "run", step=0)
    assert run(tmp_path / "run", tmp_path / "out.npz").returncode == 0
    assert np.load(tmp_path / "out.npz")["(root)"].tolist() == [0, 1, 2, 3, 4]


def test_compressed_leaves_and_names_with_slashes_are_restored(tmp_path: Path) -> None:
    import h5py

    state = {"layer/kernel:0": np.zeros((300, 300)), "layer/bias:0": np.arange(9.0)}
    ckpt.save(state, tmp_path / "run", step=0, codec={"id": "zstd", "level": 1})
    assert run(tmp_path / "run", tmp_path / "out.h5").returncode == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert all(np.array_equal(file[name], value) for name, value in state.items())
    ckpt.save({"layer": np.ones(1), **state}, tmp_path / "run", step=1)
    for ending in ("h5", "zarr"):
        refused = run(tmp_path / "run", tmp_path / f"clash.{ending}")
        assert refused.returncode == 1
        assert "a group and an array" in refused.stderr
    assert left_in(tmp_path) == ["out.h5"]


@pytest.mark.parametrize(
    ("ending", "state", "words"),
    [
        ("npz", {"é" * 32766: np.ones(1)}, "npz has at most 65,535 bytes for a name"),
        ("h5", {"deep": np.ones((1,) * 33)}, "HDF5 has at most 32 axes, and leaf deep needs 33"),
        ("h5", {"deep": np.ones((1,) * 32, "U3")}, "HDF5 has at most 32 axes, and leaf deep needs 33"),
        *((e, {"deep": np.ones((1,) * 64, "U3")}, "leaf deep has 64 axes, and as bytes") for e in ENDINGS if e != "npz"),
        ("zarr", {r"a\b": np.ones(1), "a/b": np.zeros(1)}, "zarr would read the backslash"),
    ],
)
def test_what_a_format_cannot_have_is_refused(ending: str, state: dict[str, Any], words: str, tmp_path: Path) -> None:
    ckpt.save(state, tmp_path / "run", step=1)
    with pytest.raises(CkptError, match=words):
        command.main([str(tmp_path / "run"), str(tmp_path / f"out.{ending}")], standalone_mode=False)
    assert left_in(tmp_path) == []


def test_many_plain_values_fit_into_hdf5(tmp_path: Path) -> None:
    import h5py

    state = {"a": np.arange(3), "log": ["word" * 20] * 2000}  # more than the 64 KiB of an old HDF5 attribute
    ckpt.save(state, tmp_path / "run", step=0)
    assert run(tmp_path / "run", tmp_path / "out.h5").returncode == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert len(json.loads(file.attrs["values"])) == 2000


def test_wrong_usage_of_restore_is_refused(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, _ = saved
    assert run("--help").returncode == 0
    ending = run(root, tmp_path / "out.xyz")
    assert ending.returncode == 2
    assert "--format" in ending.stderr
    assert run(root).returncode == 2
    assert run(root, tmp_path / "out.npz", "--step", -1).returncode == 2
    step = run(root, tmp_path / "out.npz", "--step", 9)
    assert step.returncode == 1
    assert "no committed step 9" in step.stderr
    assert "steps 1, 3" in step.stderr
    folder = run(root, tmp_path / "nowhere" / "out.npz")
    assert folder.returncode == 1
    assert "nowhere" in folder.stderr
    file = run(root, Path(__file__) / "out.npz")
    assert file.returncode == 1
    assert f"{__file__} is not a folder; name a file in a folder" in file.stderr
    argument = run(root, 3, tmp_path / "out.npz")
    assert argument.returncode == 2
    assert f"extra argument ({tmp_path / 'out.npz'})" in argument.stderr
    assert "give the step as an option, such as --step 7" in argument.stderr
    nothing = run(tmp_path, tmp_path / "out.npz")
    assert nothing.returncode == 1
    assert "nothing has been saved" in nothing.stderr
    for failed in (step, folder, nothing):
        assert failed.stderr.count("\n") == 1
        assert failed.stdout == ""
    assert left_in(tmp_path) == []


def test_a_folder_is_never_taken_for_an_old_result(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, _ = saved
    precious = tmp_path / "data" / "precious"
    precious.parent.mkdir()
    precious.write_text("x")
    for form in ("zarr", "npz"):
        assert run(root, precious.parent, "--format", form, "--overwrite").returncode == 1
    assert precious.read_text() == "x"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["pack", "manifest", "commit"])
def test_damage_is_reported_and_nothing_is_written(what: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    ckpt.save({"weights": np.arange(1000.0)}, root, step=1)
    ckpt.save({"weights": np.arange(1000.0) + 1}, root, step=2)
    pattern = {"pack": "pack/*.pack", "manifest": "manifest/*.parquet", "commit": "commit.json"}[what]
    (file,) = (root / "steps" / "2").glob(pattern)
    flip(file, 50)
    for ending in ENDINGS:
        done = run(root, tmp_path / f"out.{ending}")
        assert done.returncode == 1, ending
        assert file.name in done.stderr
        assert what != "pack" or "weights" in done.stderr
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr
        if what != "pack":
            break  # found before a format is chosen
    assert left_in(tmp_path) == []
    assert run(root, tmp_path / "out.npz", "--step", 1).returncode == 0


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("point", ["restore.write", "restore.written"])
def test_a_killed_restore_leaves_no_destination(
    ending: str, point: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root, _ = saved
    at = "@2" if point == "restore.write" else ""  # the first part of a .pt is read before its file exists
    killed = run(root, tmp_path / f"out.{ending}", CKPT_FAILPOINTS=f"{point}=kill{at}")
    assert killed.returncode == -signal.SIGKILL
    (left,) = left_in(tmp_path)
    assert left.startswith(".out.")
    assert left.endswith(".ckpt-tmp")


def test_a_killed_restore_leaves_the_old_destination(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, _ = saved
    dest = tmp_path / "out.npz"
    dest.write_text("old")
    run(root, dest, "--overwrite", CKPT_FAILPOINTS="restore.written=kill")
    assert dest.read_text() == "old"


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_full_disk_is_reported_in_one_line(ending: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, _ = saved
    failed = run(root, tmp_path / f"out.{ending}", CKPT_FAILPOINTS="restore.write=full")
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "injected at fail point" in failed.stderr
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_restore_removes_its_files(
    number: signal.Signals, status: int, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root, _ = saved
    started = subprocess.Popen(
        [sys.executable, "-m", "ckpt.tools.restore", str(root), str(tmp_path / "out.npz")],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "CKPT_FAILPOINTS": "restore.written=sleep:60"},
    )  # fmt: skip
    deadline = time.monotonic() + 600
    while not left_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    started.send_signal(number)
    _, stderr = started.communicate(timeout=600)
    assert started.returncode == status
    assert "Traceback" not in stderr
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(("ending", "package"), [("h5", "h5py"), ("zarr", "zarr"), ("pt", "torch")])
def test_a_missing_library_is_named(ending: str, package: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / f"{package}.py").write_text("raise ImportError('hidden')")
    failed = run(saved[0], tmp_path / f"out.{ending}", PYTHONPATH=str(tmp_path / "hide"))
    assert failed.returncode == 1
    assert "pip install 'ckpt-store[" in failed.stderr
    assert left_in(tmp_path) == ["hide"]


def test_progress_is_shown_only_on_a_terminal(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, _ = saved
    assert "step 3 " not in run(root, tmp_path / "a.npz").stderr
    assert "step 3 " in run(root, tmp_path / "b.npz", FORCE_COLOR="1").stderr
