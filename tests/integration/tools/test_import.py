"""ckpt-import: checkpoints of torch, safetensors and DCP become steps with the same bytes; all else is refused with advice."""

from __future__ import annotations

import collections
import enum
import json
import os
import pickle
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.folders import PROGRAMS
from helpers.imports import IMPORT, assert_killed_import_leaves_no_step, growth_of_memory, load_imported
from helpers.torchrun import torchrun
from safetensors.torch import save_file

import ckpt
from ckpt.storage.base.errors import CkptError
from ckpt.tools import import_step
from ckpt.tools.restore import command as restore


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.requires_grad == expected.requires_grad
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
        assert torch.equal(*raw)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


# --- torch.save ------------------------------------------------------------------------------------------------------


def test_every_kind_of_tensor_of_torch_save(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    tied = torch.randn(4)
    state = {
        "plain": torch.arange(5), "transposed": torch.randn(3, 4).T, "view": base[1:3, 2:5], "strided": base[::2, ::3],
        "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "bf16": torch.randn(3).bfloat16(),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn), "bool": torch.tensor([True, False]), "complex": torch.randn(2) + 1j,
        "nan": torch.tensor([float("nan")]), "parameter": torch.nn.Parameter(torch.randn(2)),
        "frozen": torch.nn.Parameter(torch.randn(2), requires_grad=False), "tied": [tied, tied],
        "large": torch.randn(3_000_000),
        "ordered": collections.OrderedDict(a=1, b=(1, torch.ones(2))), "name": "x", "none": None, 3: 0.5,
    }  # fmt: skip
    torch.save(state, tmp_path / "state.pt")
    loaded = load_imported(tmp_path / "state.pt")
    assert_same(loaded, state)
    assert loaded["tied"][0] is loaded["tied"][1]


def make_training(*layers: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model of two linear layers with `layers` between them, and its optimizer, always with the same values."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), *layers, torch.nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train and return the loss of each step."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_training_continues_from_an_imported_file(tmp_path: Path) -> None:
    model, optimizer = make_training(torch.nn.BatchNorm1d(8))
    train(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pt")
    expected = train(model, optimizer, range(3, 6))
    load_imported(tmp_path / "old.pt", "--step", 2)
    model, optimizer = make_training(torch.nn.BatchNorm1d(8))
    ckpt.load(tmp_path / "imported", like={"model": model, "optimizer": optimizer}, step=2)
    assert train(model, optimizer, range(3, 6)) == expected


def test_a_state_dict_is_put_under_a_key(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    load_imported(tmp_path / "weights.pt", "--under", "model")
    other = torch.nn.Linear(3, 2)
    ckpt.load(tmp_path / "imported", like={"model": other})
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors"])
def test_names_are_replaced(name: str, tmp_path: Path) -> None:
    """A model whose parameters had other names is filled by a step that was imported with the present ones."""
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 2)})
    saved = {f"model.{key.replace('body', 'encoder')}": value for key, value in model.state_dict().items()}
    if name == "state.pt":
        nested = {key.removeprefix("model."): value for key, value in saved.items()}
        torch.save({"model": nested, "groups": [{"lr": 0.1}]}, tmp_path / name)
    else:
        save_file(saved, tmp_path / name)
    load_imported(tmp_path / name, "--strip", "model.", "--rename", r"^encoder\.=body.", "--under", "model")
    other = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 2)})
    ckpt.load(tmp_path / "imported", like={"model": other})
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_wrong_renames_are_refused(tmp_path: Path) -> None:
    save_file({"a.x": torch.ones(2), "b.x": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CkptError, match=r"gives a\.x and b\.x of .* one name, x"):
        load_imported(tmp_path / "model.safetensors", "--rename", r"^.\.=")
    with pytest.raises(CkptError, match=r"begins with --strip c\."):
        load_imported(tmp_path / "model.safetensors", "--strip", "c.")
    with pytest.raises(CkptError, match="leave nothing of the name"):
        load_imported(tmp_path / "model.safetensors", "--rename", "^.*$=")
    assert not (tmp_path / "imported").exists()


def test_a_file_of_the_old_format_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(5)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_same(load_imported(tmp_path / "old.pt"), {"a": torch.arange(5)})


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["CKPT_TEST_EVIL"],)


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_TEST_EVIL", str(tmp_path / "evil"))
    torch.save({"a": torch.ones(2), "b": Evil()}, tmp_path / "state.pt")
    torch.save(Evil(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Evil()))
    words = {"state.pt": "weights_only", "old.pt": "weights_only", "folder": "none of DCP's metadata"}
    for name, word in words.items():
        with pytest.raises(CkptError, match=word) as error:
            load_imported(tmp_path / name)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "imported").exists()


# --- safetensors -----------------------------------------------------------------------------------------------------


def test_safetensors_of_a_step_come_back(tmp_path: Path) -> None:
    """`ckpt-restore` writes a file, a folder with shards, and ties; `ckpt-import` reads them."""
    embed = torch.randn(300, 4).bfloat16()
    state = {
        "embed": embed,
        "norm.weight": torch.ones(3),
        "head": embed,
        "empty": torch.zeros(0, 2),
        "scalar": torch.tensor(1.5),
    }
    ckpt.save(state, tmp_path / "run", step=1)
    assert restore.main([str(tmp_path / "run"), str(tmp_path / "out.safetensors")], standalone_mode=False) == 0
    loaded = load_imported(tmp_path / "out.safetensors")
    assert loaded["head"] is loaded["embed"]
    assert_same(dict(sorted(loaded.items())), dict(sorted(state.items())))
    arguments = [str(tmp_path / "run"), str(tmp_path / "hf"), "--hf", "--max-shard-size", "1KB"]
    assert restore.main(arguments, standalone_mode=False) == 0
    del state["head"]
    assert_same(dict(sorted(load_imported(tmp_path / "hf", "--under", "model")["model"].items())), dict(sorted(state.items())))


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(50), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])

    def write(name: str, changes: dict[str, Any]) -> None:
        text = json.dumps({**header, "a": {**header["a"], **changes}}).encode()
        (tmp_path / name).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    (tmp_path / "short.safetensors").write_bytes(data[:-20])
    (tmp_path / "no-header.safetensors").write_bytes(data[:20])
    (tmp_path / "no-json.safetensors").write_bytes(data[:8] + b"x" * length)
    (tmp_path / "nothing.safetensors").write_bytes(b"")
    write("shape.safetensors", {"shape": [51]})
    write("type.safetensors", {"dtype": "F6_E2M3"})
    write("offsets.safetensors", {"data_offsets": [-8, 192]})
    for path in sorted(tmp_path.glob("*-*.safetensors")) + [
        tmp_path / f"{n}.safetensors" for n in ("short", "nothing", "shape")
    ]:
        with pytest.raises(CkptError, match=r"again|fit"):
            load_imported(path)
    with pytest.raises(CkptError, match="F6_E2M3"):
        load_imported(tmp_path / "type.safetensors")
    with pytest.raises(CkptError, match="fit"):
        load_imported(tmp_path / "offsets.safetensors")
    with pytest.raises(CkptError, match="several files"):
        load_imported(_copies(tmp_path, data))
    assert not (tmp_path / "imported").exists()


def _copies(tmp_path: Path, data: bytes) -> Path:
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / f"{name}.safetensors").write_bytes(data)
    return tmp_path / "two"


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": "one.safetensors", "b": "two.safetensors"}, "two.safetensors, which is missing"),
        ({"a": "../one.safetensors"}, "not beside it"),
        ({"a": "one.safetensors", "z": "one.safetensors"}, "names z"),
        ([1], "is not an index"),
    ],
)
def test_wrong_indexes_are_refused(weights: Any, words: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(5)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(CkptError, match=words):
        load_imported(tmp_path / "model.safetensors.index.json")


def test_shards_of_torch_save_with_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"a": torch.arange(5)}, folder / "pytorch_model-1.bin")
    torch.save({"b": torch.ones(2)}, folder / "pytorch_model-2.bin")
    index = {"weight_map": {"b": "pytorch_model-2.bin", "a": "pytorch_model-1.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_same(load_imported(folder), {"b": torch.ones(2), "a": torch.arange(5)})


# --- DCP -------------------------------------------------------------------------------------------------------------


def test_a_sharded_folder_of_dcp(tmp_path: Path) -> None:
    done = torchrun(3, PROGRAMS / "dcp_folder.py", str(tmp_path / "dcp"))
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 3
    loaded = load_imported(tmp_path / "dcp")
    expected = {
        "model": {
            "rows": torch.arange(7.0 * 6).reshape(7, 6), "columns": torch.arange(8.0 * 5).reshape(8, 5).bfloat16(),
            "replicated": torch.arange(4), "plain": torch.ones(3),
        },
        "groups": [{"lr": 0.5, "moments": torch.full((2, 2), 3.0)}],
        "step": 7,
    }  # fmt: skip
    assert set(loaded["model"]) == set(expected["model"])
    assert_same({**loaded, "model": {k: loaded["model"][k] for k in expected["model"]}}, expected)

    next((tmp_path / "dcp").glob("__1*.distcp")).unlink()
    with pytest.raises(CkptError, match="which is missing"):
        load_imported(tmp_path / "dcp")


class MembersByName(pickle.Pickler):
    """Stores members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_of_dcp_that_another_version_of_python_wrote(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    with file.open("wb") as target:
        MembersByName(target).dump(metadata)
    assert b"getattr" in file.read_bytes()
    assert_same(load_imported(tmp_path / "dcp"), {"w": torch.arange(6.0)})


def test_getattr_in_metadata_of_dcp_reaches_no_function(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    class Reaches:
        def __reduce__(self) -> Any:
            return getattr, (dcp.metadata.Metadata, "__init__")

    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Reaches()))
    with pytest.raises(CkptError, match="no enumeration"):
        load_imported(tmp_path / "dcp")


def test_large_tensors_of_dcp(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"big": torch.randn(3000, 1001), "transposed": torch.randn(100, 200).T, "tail": torch.arange(3)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded = load_imported(tmp_path / "dcp")
    assert_same({name: loaded[name] for name in state}, state)


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


def write_universal(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a universal checkpoint in the layout of DeepSpeed's ds_to_universal, of ZeRO stages 1 and 2."""
    for name, parameter in model.named_parameters():
        parts = {"fp32": parameter.detach(), **optimizer.state[parameter]}
        (folder / "zero" / name).mkdir(parents=True)
        for key, value in parts.items():
            content = int(value) if key == "step" else {"cat_dim": 0, "param": value}
            torch.save(content, folder / "zero" / name / f"{key}.pt")


def test_a_training_continues_from_a_universal_checkpoint(tmp_path: Path) -> None:
    from ckpt.adapters.torch import ModelState

    model, optimizer = make_training()
    train(model, optimizer, range(3))
    write_universal(tmp_path / "step3_universal", model, optimizer)
    (tmp_path / "latest_universal").write_text("step3_universal")
    expected = train(model, optimizer, range(3))
    load_imported(tmp_path / "step3_universal")
    model, optimizer = make_training()
    ckpt.load(tmp_path / "imported", like=ModelState(model, optimizer))
    assert train(model, optimizer, range(3)) == expected

    torch.save(torch.zeros(32), tmp_path / "step3_universal" / "zero" / "0.weight" / "fp32.pt")
    with pytest.raises(CkptError, match="stage 3"):
        load_imported(tmp_path / "step3_universal")


# --- all formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mp_rank_00/zero_pp_rank_0_mp_rank_00_optim_states.pt", "global_step100"),
        ("manifest.ocdbt", "not a complete checkpoint of Orbax"),
        ("checkpoint", "indexes of TensorFlow or none"),
        ("0.metadata", "0.metadata is not written by Paddle, or is damaged"),
        ("unknown", "--format"),
    ],
)
def test_other_formats_are_refused_with_advice(name: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "source" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    with pytest.raises(CkptError, match=words) as error:
        load_imported(tmp_path / "source")
    assert "\n" not in str(error.value)
    with pytest.raises(CkptError, match="does not exist"):
        load_imported(tmp_path / "nothing")


def test_only_a_part_is_imported(tmp_path: Path) -> None:
    """In a folder of DCP, an object that can't be imported is left out by --only. Other files of the folder are named."""
    import torch.distributed.checkpoint as dcp

    state = {"model": {"a": torch.ones(2), "b": torch.zeros(3)}, "extra": collections.Counter("ab"), "list": [1, torch.ones(1)]}
    dcp.save({**state, "extra": Evil}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CkptError, match="extra has objects that weights_only refuses"):
        load_imported(tmp_path / "dcp")
    assert_same(load_imported(tmp_path / "dcp", "--only", "model"), {"model": state["model"]})
    torch.save({k: state[k] for k in ("model", "list")}, tmp_path / "state.pt")
    options = ("--only", "model.a", "--only", "list.1")
    assert_same(load_imported(tmp_path / "state.pt", *options), {"model": {"a": torch.ones(2)}, "list": [None, torch.ones(1)]})
    with pytest.raises(CkptError, match="matches --only"):
        load_imported(tmp_path / "state.pt", "--only", "modle.*")
    torch.save({}, tmp_path / "dcp" / "common.pt")
    command_line = [*IMPORT, str(tmp_path / "dcp"), str(tmp_path / "more"), "--only", "model"]
    assert "common.pt" in subprocess.run(command_line, capture_output=True, text=True, timeout=120).stderr


def test_damaged_torch_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "state.pt")
    data = (tmp_path / "state.pt").read_bytes()
    for name, content in {"short.pt": data[:2000], "text.pt": b"hello", "empty.pt": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CkptError, match=r"copy it again|weights_only"):
            load_imported(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(CkptError, match="copy it again"):
        load_imported(tmp_path / "other.pt")


def test_a_damaged_byte_of_a_tensor_is_found(tmp_path: Path) -> None:
    """Files of torch.save have a CRC-32 for each tensor, also inside of those of DCP."""
    import torch.distributed.checkpoint as dcp

    torch.save({"a": torch.zeros(100_000)}, tmp_path / "state.pt")
    dcp.save({"a": torch.zeros(100_000)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for source, file in (("state.pt", "state.pt"), ("dcp", "dcp/__0_0.distcp")):
        data = bytearray((tmp_path / file).read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / file).write_bytes(data)
        with pytest.raises(CkptError, match="is damaged .*CRC.*: copy it again"):
            load_imported(tmp_path / source)
    assert not (tmp_path / "imported").exists()


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(5)}, tmp_path / "state.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(load_imported(tmp_path / "state.pt"), {"a": torch.arange(5)})


def test_a_source_that_changes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(50), "b": torch.ones(3)}, source)

    def change(_: str) -> None:
        data = bytearray(source.read_bytes())
        data[-1] ^= 1
        source.write_bytes(data)

    monkeypatch.setattr(import_step, "failpoint", change)
    with pytest.raises(CkptError, match="--overwrite"):
        load_imported(source)


@pytest.mark.parametrize("point", ["save.stage", "save.manifest", "save.commit"])
def test_a_killed_import_leaves_no_step(point: str, tmp_path: Path) -> None:
    torch.save({"a": torch.randn(1000)}, tmp_path / "state.pt")
    assert_killed_import_leaves_no_step(tmp_path / "state.pt", point)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_memory_does_not_grow_with_the_source(ending: str, tmp_path: Path) -> None:
    """A small file first loads all modules; then 800 MB are imported with much less memory."""
    save = torch.save if ending == "pt" else save_file
    save({"a": torch.ones(10)}, tmp_path / f"small.{ending}")
    state = {"big": torch.ones(1 << 27), **{f"layer.{i}": torch.full((1 << 20,), float(i)) for i in range(64)}}
    save(state, tmp_path / f"big.{ending}")
    assert growth_of_memory(tmp_path / f"small.{ending}", tmp_path / f"big.{ending}", tmp_path) < 400 << 20
    assert np.asarray(ckpt.open(tmp_path / "two")[0]["layer.7"][:3]).tolist() == [7, 7, 7]
