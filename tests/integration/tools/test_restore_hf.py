"""ckpt-restore --hf: the files of the folder, refusals, kills and memory. tests/integration/hf_export loads such folders."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import click
import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.peak_memory import growth_of_command
from helpers.restored_files import left_in, run
from safetensors.torch import load_file

import ckpt
from ckpt.storage.base.errors import CkptError
from ckpt.tools.restore import command


def export(*arguments: object) -> None:
    assert command.main([*map(str, arguments)], standalone_mode=False) == 0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository with a model with tied weights, and an optimizer."""
    embed = torch.arange(60.0).reshape(30, 2)
    model = {"embed.weight": embed, "a.weight": torch.ones(50).bfloat16(), "b.weight": torch.zeros(50), "head.weight": embed}
    ckpt.save({"model": model, "optimizer": {"step": np.arange(3)}, "epoch": 1}, tmp_path / "run", step=3)
    return tmp_path / "run"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return the folder of a model, with files that are copied and files that are not."""
    folder = tmp_path / "config"
    folder.mkdir()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
    ):
        (folder / name).write_text("{}")
    for name in ("model.safetensors", "trainer_state.json", "optimizer.pt", "README.md"):
        (folder / name).write_text("other")
    return folder


def test_one_file_has_each_array_once(root: Path, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(root, out, "--hf", "--strip", "model.", "--config", config)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {out}: 3 leaves of step 3, {done.stdout.rpartition(', ')[2]}"
    assert done.stderr == ""
    assert left_in(out) == [
        "config.json", "generation_config.json", "merges.txt", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "vocab.json",
    ]  # fmt: skip
    loaded = load_file(out / "model.safetensors")
    assert set(loaded) == {"embed.weight", "a.weight", "b.weight"}
    assert loaded["a.weight"].dtype == torch.bfloat16
    assert torch.equal(loaded["embed.weight"], torch.arange(60.0).reshape(30, 2))


def test_large_models_are_sharded_with_an_index(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(root, out, "--format", "hf", "--strip", "model.", "--max-shard-size", "300")
    assert done.returncode == 0, done.stderr
    assert "config.json" in done.stderr
    assert done.stderr.count("\n") == 1
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert left_in(out) == [*files, "model.safetensors.index.json"]
    assert json.loads((out / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 540},
        "weight_map": {"a.weight": files[1], "b.weight": files[1], "embed.weight": files[0]},
    }
    assert set(load_file(out / files[1])) == {"a.weight", "b.weight"}


def test_the_part_of_the_model_must_be_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptError, match=r"parts model, optimizer, .*--strip model\."):
        export(root, tmp_path / "out", "--hf")
    export(root, tmp_path / "all", "--hf", "--only", "*")
    assert "model.a.weight" in load_file(tmp_path / "all" / "model.safetensors")
    ckpt.save({"a.weight": torch.ones(3)}, tmp_path / "flat", step=1)
    export(tmp_path / "flat", tmp_path / "plain", "--hf")
    assert left_in(tmp_path) == ["all", "flat", "plain"]


def test_a_type_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    ckpt.save({"w": np.zeros(3, ml_dtypes.int4)}, tmp_path / "run", step=1)
    with pytest.raises(CkptError, match="leaf w has type int4"):
        export(tmp_path / "run", tmp_path / "out", "--hf")
    assert left_in(tmp_path) == []


def test_a_model_without_arrays_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="choose those of a model with --only"):
        export(root, tmp_path / "out", "--hf", "--only", "epoch")
    assert left_in(tmp_path) == []


def test_wrong_configurations_are_refused(root: Path, config: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for name, words in {"empty": "no config.json in it", "bad.json": "is not JSON", "list.json": "not a JSON object"}.items():
        with pytest.raises(CkptError, match=words):
            export(root, tmp_path / "out", "--hf", "--strip", "model.", "--config", tmp_path / name)
    with pytest.raises(click.UsageError, match="need --hf"):
        export(root, tmp_path / "out.npz", "--config", config)
    with pytest.raises(click.UsageError, match="exclude each other"):
        export(root, tmp_path / "out", "--hf", "--format", "npz")
    with pytest.raises(CkptError, match="no adapter of this name; leave the option out"):
        export(root, tmp_path / "out", "--hf", "--strip", "model.", "--adapter", "default")
    assert not (tmp_path / "out").exists()


def test_only_an_exported_folder_is_replaced(root: Path, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = (root, out, "--hf", "--strip", "model.", "--config", config)
    export(*arguments)
    with pytest.raises(CkptError, match="--overwrite"):
        export(*arguments)
    export(*arguments, "--overwrite", "--max-shard-size", "300")
    assert not (out / "model.safetensors").exists()
    (out / "notes.txt").write_text("precious")
    with pytest.raises(CkptError, match=r"notes\.txt"):
        export(*arguments, "--overwrite")
    assert (out / "notes.txt").read_text() == "precious"
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CkptError, match="is not a folder"):
        export(root, tmp_path / "file", "--hf", "--strip", "model.", "--overwrite")


@pytest.mark.parametrize("point", ["restore.write", "restore.written"])
def test_a_killed_export_leaves_no_folder(point: str, root: Path, tmp_path: Path) -> None:
    arguments = (root, tmp_path / "out", "--hf", "--strip", "model.", "--max-shard-size", 300)
    at = "@3" if point == "restore.write" else ""
    killed = run(*arguments, CKPT_FAILPOINTS=f"{point}=kill{at}")
    assert killed.returncode == -signal.SIGKILL
    (left,) = left_in(tmp_path)
    assert left.startswith(".out.")
    full = run(*arguments, CKPT_FAILPOINTS="restore.write=full@2")
    assert full.returncode == 1
    assert left_in(tmp_path) == [left]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Leaves of 256 MB and of 24 × 8 MB are written with the memory of a few pieces."""
    model = {"small": np.zeros(8, np.float32), "big": np.ones((1 << 13, 1 << 13), np.float32)}
    model |= {f"layer.{i}": np.full(1 << 21, i, np.float32) for i in range(24)}
    ckpt.save(model, tmp_path / "run", step=1, codec="none")
    run_dir = tmp_path / "run"
    small = [run_dir, tmp_path / "first", "--hf", "--only", "small"]
    assert growth_of_command("restore", small, [run_dir, tmp_path / "out", "--hf"]) < 160 << 20
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(loaded[name].numpy(), value) for name, value in model.items())
