"""ckpt-import reads folders of paddle.distributed.save_state_dict, without Paddle, and runs nothing of them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.folders import PROGRAMS
from helpers.imports import assert_killed_import_leaves_no_step, growth_of_memory, load_imported
from helpers.paddle_ranks import run_ranks
from helpers.refusal import refused

import ckpt
from ckpt.adapters.paddle import ModelState
from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_paddle_distributed import read_state
from ckpt.tools.import_paddle_names import NAMES
from ckpt.tools.import_paddle_pickle import read_pickle

SIZES = {"whole": 1, "rows": 2, "sharded": 2, "grid": 4}


@pytest.fixture(scope="module", params=SIZES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the ranks of one division have written."""
    folder = tmp_path_factory.mktemp(request.param)
    size = SIZES[request.param]
    status, _ = run_ranks(PROGRAMS / "paddle_distributed_saves.py", size, folder, "saved", "losses", request.param)
    assert status == {0}
    assert len(list((folder / "saved" / "training").glob("*.distcp"))) == size
    return folder / "saved"


def arrays(url: Path) -> dict[str, tuple[Any, ...]]:
    """Return type, shape and bytes of all arrays of the newest step, by name."""
    step = ckpt.open(url)[0]
    return {name: (step[name].dtype, step[name].shape, np.asarray(step[name][...]).tobytes()) for name in step}


def test_a_training_becomes_the_state_of_a_model(saved: Path, tmp_path: Path) -> None:
    load_imported(saved / "training", "--under", "train", to=tmp_path / "imported")
    found, expected = arrays(tmp_path / "imported"), arrays(saved / "ckpt")
    assert found == {name: value for name, value in expected.items() if "learning_rate" not in name}
    assert sum("moment1" in name for name in found) == 3
    model = paddle.nn.Sequential(paddle.nn.Linear(6, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 3))
    model[0].bias.stop_gradient = True
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    ckpt.load(tmp_path / "imported", like={"train": ModelState(model, optimizer)})
    assert model[0].weight.numpy().tobytes() == found["train.model.0.weight"][2]


def test_values_are_those_of_load_state_dict(saved: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    for shape in ((6, 4), (4,), (4, 3), (3,)):  # the parameters of the program
        draw.standard_normal(shape)
    values = {f"{shape}": draw.integers(0, 99, shape) for shape in ((7, 4), (5,), (2, 3, 6), (1, 4))}
    found = load_imported(saved / "extra", to=tmp_path / "imported")
    plain = found.pop("plain")
    assert found.keys() | {"(5,)"} == values.keys()
    assert {name: tensor.tolist() for name, tensor in found.items()} == {name: values[name].tolist() for name in found}
    assert plain["float8"].dtype == paddle.float8_e4m3fn
    assert plain["bfloat16"].dtype == paddle.bfloat16
    assert [plain[name].astype("float32").tolist() for name in ("bfloat16", "float8", "scalar")] == [[*range(6)]] * 2 + [2.5]
    if paddle.__version__ < "3.1":
        return  # its load_state_dict ends a process on a host, because it copies to an accelerator
    expected = {name: paddle.zeros(tensor.shape, tensor.dtype) for name, tensor in found.items()}
    narrow = {f"plain.{name}": paddle.zeros(plain[name].shape, plain[name].dtype) for name in ("bfloat16", "scalar")}
    paddle.distributed.load_state_dict(expected | narrow, str(saved / "extra"))
    imported = found | {f"plain.{name}": tensor for name, tensor in plain.items()}
    for name, tensor in (expected | narrow).items():
        assert imported[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_slices_of_flattened_tensors_are_joined(saved: Path, tmp_path: Path) -> None:
    if not (saved / "slices").exists():
        pytest.skip("this division has no slices, or this version of Paddle")
    found = load_imported(saved / "slices", to=tmp_path / "imported")
    for name in ("uneven", "rows", "one", "columns"):
        assert found[name].tolist() == np.arange(30).reshape(5, 6).tolist()


# --- damaged and hostile folders ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a save of one process."""
    state = {"w": paddle.arange(300).reshape([30, 10]), "b": {"c": paddle.ones([5])}}
    paddle.distributed.save_state_dict(state, str(tmp_path / "source"))
    return tmp_path / "source"


def test_damaged_and_truncated_files_are_refused(folder: Path, tmp_path: Path) -> None:
    for name, step in (("0_0.distcp", 97), ("0.metadata", 13)):
        whole = (folder / name).read_bytes()
        for length in range(0, len(whole) - 1, step):
            (folder / name).write_bytes(whole[:length])
            with refused(CkptError, "copy it again", name):
                load_imported(folder)
        (folder / name).write_bytes(whole)
    assert not (tmp_path / "imported").exists()
    assert load_imported(folder)["w"].tolist() == np.arange(300).reshape(30, 10).tolist()


def test_a_flipped_bit_of_the_metadata_gives_an_error_or_the_same_values(folder: Path) -> None:
    """Paddle stores no checksums, so that a flipped bit of the values themselves can't be found."""
    whole = (folder / "0.metadata").read_bytes()
    names: set[tuple[str, ...]] = set()
    for at in range(len(whole)):
        (folder / "0.metadata").write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            state = read_state(folder)
        except CkptError:
            continue
        names.add(tuple(state))
        for leaf in filter(lambda value: not isinstance(value, dict), state.values()):
            assert sum(box.size for box, _ in leaf.regions) == np.prod(leaf.shape)
    (folder / "0.metadata").write_bytes(whole)
    assert ("w", "b") in names


def test_folders_that_are_not_complete_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    files = [file for file in (saved / "training").glob("*.distcp") if read_pickle(file).keys() - {NAMES}]
    assert files
    for name in sorted(file.name for file in files):  # a rank of which another has all tensors, too, may have an empty file
        shutil.copytree(saved / "training", folder)
        (folder / name).unlink()
        with refused(CkptError, f"is in {name}, which is missing", "of all ranks"):
            load_imported(folder)
        shutil.rmtree(folder)
    shutil.copytree(saved / "training", folder)
    shutil.copy(folder / "0.metadata", folder / "7.metadata")
    with refused(CkptError, "several checkpoints (0.metadata, 7.metadata)", "name the .metadata file"):
        load_imported(folder)
    assert "model" in load_imported(folder / "0.metadata")


def changed(folder: Path, *replacements: tuple[bytes, bytes]) -> None:
    """Replace bytes of the metadata by as many others."""
    data = (folder / "0.metadata").read_bytes()
    for old, new in replacements:
        assert old in data
        assert len(old) == len(new)
        data = data.replace(old, new)
    (folder / "0.metadata").write_bytes(data)


@pytest.mark.parametrize(
    ("replacement", "words"),
    [
        ((b"0_0.distcp", b"/etc/hosts"), "not a file that Paddle writes"),
        ((b"0_0.distcp", b"../.distcp"), "not a file that Paddle writes"),
        ((b"0_0.distcp", b"1_0.distcp"), "which is missing"),
        ((b"K\x1eK\n\x86", b"K\x1eK\x09\x86"), "not the one that the metadata describes"),
        ((b"\x05int64", b"\x05int32"), "not the one that the metadata describes"),
        ((b"\x05int64", b"\x05int65"), "int65"),
        ((b"\x08b.c\x94"[1:], b"b.d\x94"), "b.d is missing in 0_0.distcp"),
        ((b"Metadata\x94\x93", b"Metadatb\x94\x93"), "an object of paddle.distributed"),
    ],
)
def test_metadata_that_does_not_fit_the_files_is_refused(
    replacement: tuple[bytes, bytes], words: str, folder: Path, tmp_path: Path
) -> None:
    changed(folder, replacement)
    with refused(CkptError, words):
        load_imported(folder)
    assert not (tmp_path / "imported").exists()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["CKPT_TEST_EVIL"],)


RECURSIVE: list[Any] = []
RECURSIVE.append(RECURSIVE)
RECORD = b"\x80\x04cpaddle.x\nMetadata\n)\x81"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps({"a": 1}), "not the metadata of paddle.distributed.save_state_dict"),
        (pickle.dumps(RECURSIVE), "or is damaged"),
        (RECORD + b".", "not the metadata"),
        (RECORD + b"(K\x01K\x02db.", "not the metadata"),
        (RECORD + b"K\x01b.", "or is damaged"),
        (b"\x80\x04cpaddle.x\nMetadata\nK\x01\x85\x81.", "a call"),
        (b"\x80\x04cpaddle.x\nMetadata\n)R.", "a call"),
        (b"\x80\x04cos\nMetadata\n)\x81.", "an object of os.Metadata"),
    ],
)
@pytest.mark.parametrize("name", ["0.metadata", "0_0.distcp"])
def test_other_objects_are_refused(content: bytes, words: str, name: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    with refused(CkptError, words if name == "0.metadata" else ""):
        load_imported(folder)


@pytest.mark.parametrize("name", ["0.metadata", "0_0.distcp"])
def test_nothing_is_executed(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TEST_EVIL", str(tmp_path / "evil"))
    (folder / name).write_bytes(pickle.dumps({"w": Evil()}))
    with refused(CkptError, "posix.mkdir", name):
        load_imported(folder)
    assert not (tmp_path / "evil").exists()


def test_a_killed_import_leaves_no_step(folder: Path) -> None:
    assert_killed_import_leaves_no_step(folder)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    """A small folder first loads all modules; then 512 MB are imported with much less memory, and without Paddle."""
    for name, size in (("small", 1), ("big", 1 << 26)):
        paddle.distributed.save_state_dict({"big": paddle.ones([size], "float64")}, str(tmp_path / name))
    assert growth_of_memory(tmp_path / "small", tmp_path / "big", tmp_path, absent="paddle") < 400 << 20


def test_files_of_safetensors(tmp_path: Path) -> None:
    """Paddle 3.3 can write the files of the ranks as safetensors."""
    state = {"a": {"w": paddle.arange(6).reshape([2, 3])}, "half": paddle.ones([3]).astype("bfloat16")}
    try:
        paddle.distributed.save_state_dict(state, str(tmp_path / "source"), safetensors=True)
    except TypeError:
        pytest.skip("this version of Paddle writes no safetensors")
    found = load_imported(tmp_path / "source")
    assert found["a"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["half"].dtype == paddle.bfloat16
    header = json.loads((tmp_path / "source/0_0.safetensors").read_bytes()[8:].partition(b"}}")[0] + b"}}")
    assert "a.w" in header
