"""ckpt-import: files of torch, and checkpoints of DeepSpeed, become steps with the same bytes; all else is refused."""

from __future__ import annotations

import collections
import os
import pickle
import subprocess
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.imports import IMPORT, assert_killed_import_leaves_no_step, assert_same_tensors, growth_of_memory, load_imported
from safetensors.torch import save_file

import ckpt
from ckpt.storage.base.errors import CkptError
from ckpt.tools import import_deepspeed, import_step, import_tensorflow, import_zero

# --- torch.save ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["torch reports places", "torch before 2.7"])
def each_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files as with this torch, and as with one whose torch.load does not report where tensors lie."""
    if not request.param:
        monkeypatch.setattr("ckpt.tools.import_torch.reports_storage_offsets", lambda torch: False)


@pytest.mark.parametrize(
    ("pointer", "file"),
    [
        ("latest_universal", "zero/a/fp32.pt"),
        ("latest", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("checkpoint", "model.ckpt-1.index"),
    ],
)
def test_a_file_that_should_name_the_newest_checkpoint_and_is_not_text_is_refused(
    pointer: str, file: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(b"x")
    (tmp_path / pointer).write_bytes(b"\xff\xfe")
    readers = {"latest_universal": import_deepspeed, "latest": import_zero, "checkpoint": import_tensorflow}
    with pytest.raises(CkptError, match=f"{pointer} can't be read as text .*: copy it again, or name the checkpoint itself"):
        readers[pointer].read_state(tmp_path)


@pytest.mark.usefixtures("each_torch")
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
    assert_same_tensors(loaded, state)
    assert loaded["tied"][0] is loaded["tied"][1]


@pytest.mark.usefixtures("each_torch")
@pytest.mark.parametrize("view", [torch.tensor([1 + 2j]).conj(), torch._neg_view(torch.ones(2))], ids=["conj", "neg"])
def test_a_lazy_view_whose_bytes_are_not_its_elements_is_refused(view: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"view": view}, tmp_path / "state.pt")
    with pytest.raises(CkptError, match="view is a conjugate or negative view: load it with torch"):
        load_imported(tmp_path / "state.pt")


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
    assert_same_tensors(dict(other.state_dict()), dict(model.state_dict()))


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
    assert_same_tensors(load_imported(tmp_path / "old.pt"), {"a": torch.arange(5)})


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["CKPT_TEST_EVIL"],)


@pytest.mark.usefixtures("each_torch")
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


@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["numbers", "tensors"])
def test_optimizer_files_of_zero_of_two_steps_are_refused(kind: Any, tmp_path: Path) -> None:
    """A save into the folder of an earlier one was killed. With a constant learning rate, only the step counts differ."""

    def write(steps: tuple[int, int]) -> None:
        for rank, step in enumerate(steps):
            state = {0: {"step": kind(step), "exp_avg": torch.ones(2)}}
            optimizer = {
                "partition_count": [2], "single_partition_of_fp32_groups": [torch.full((2,), 1.0 + rank)],
                "base_optimizer_state": {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]},
            }  # fmt: skip
            path = tmp_path / "source" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer}, path)

    (tmp_path / "source").mkdir()
    model = {"module": {}, "param_shapes": [{"a": torch.Size([4])}], "global_steps": 200}
    torch.save(model, tmp_path / "source" / "mp_rank_00_model_states.pt")
    write((200, 100))
    with pytest.raises(CkptError, match="files of different steps: the save was killed"):
        load_imported(tmp_path / "source")
    write((200, 200))
    assert load_imported(tmp_path / "source")["model"]["a"].tolist() == [1, 1, 2, 2]


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


@pytest.mark.usefixtures("each_torch")
def test_only_a_part_is_imported(tmp_path: Path) -> None:
    """In a folder of DCP, an object that can't be imported is left out by --only. Other files of the folder are named."""
    import torch.distributed.checkpoint as dcp

    state = {"model": {"a": torch.ones(2), "b": torch.zeros(3)}, "extra": collections.Counter("ab"), "list": [1, torch.ones(1)]}
    dcp.save({**state, "extra": Evil}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CkptError, match="extra has objects that weights_only refuses"):
        load_imported(tmp_path / "dcp")
    assert_same_tensors(load_imported(tmp_path / "dcp", "--only", "model"), {"model": state["model"]})
    torch.save({k: state[k] for k in ("model", "list")}, tmp_path / "state.pt")
    options = ("--only", "model.a", "--only", "list.1")
    assert_same_tensors(
        load_imported(tmp_path / "state.pt", *options), {"model": {"a": torch.ones(2)}, "list": [None, torch.ones(1)]}
    )
    with pytest.raises(CkptError, match="matches --only"):
        load_imported(tmp_path / "state.pt", "--only", "modle.*")
    torch.save({}, tmp_path / "dcp" / "common.pt")
    command_line = [*IMPORT, str(tmp_path / "dcp"), str(tmp_path / "more"), "--only", "model"]
    assert "common.pt" in subprocess.run(command_line, capture_output=True, text=True, timeout=600).stderr


def test_a_part_of_a_dict_with_two_names_is_imported(tmp_path: Path) -> None:
    shared = collections.OrderedDict(x=torch.ones(2), y=torch.zeros(3))
    shared._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    torch.save({"first": shared, "second": shared}, tmp_path / "state.pt")
    loaded = load_imported(tmp_path / "state.pt", "--only", "first.x", "--only", "second.y")
    kind = collections.OrderedDict
    assert_same_tensors(loaded, {"first": kind(x=shared["x"]), "second": kind(y=shared["y"])})
    assert loaded["second"]._metadata == shared._metadata  # type: ignore[attr-defined]


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


@pytest.mark.usefixtures("each_torch")
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
    assert_same_tensors(load_imported(tmp_path / "state.pt"), {"a": torch.arange(5)})


@pytest.mark.usefixtures("each_torch")
def test_a_file_whose_tensors_have_another_order_is_refused_or_equal(tmp_path: Path) -> None:
    state = {str(value): torch.full((16,), value) for value in range(12)}
    torch.save(state, tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    last = {name: records.pop(name) for name in ("data/2", "data/1", "version", ".data/serialization_id")}
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "changed.pt"))
    for name, data in [*records.items(), *list(last.items())[:2]]:  # the writer adds the others
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    assert_same_tensors(torch.load(tmp_path / "changed.pt"), state)
    try:
        assert_same_tensors(load_imported(tmp_path / "changed.pt"), state)
    except CkptError as error:
        assert "in another order than torch writes them: load it with torch" in str(error)


@pytest.mark.usefixtures("each_torch")
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_file_that_another_program_has_packed_is_refused_or_equal(compression: int, tmp_path: Path) -> None:
    state = {"a": torch.arange(1000.0), "b": torch.arange(1000.0) + 5}
    torch.save(state, tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as old, zipfile.ZipFile(tmp_path / "packed.pt", "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert_same_tensors(torch.load(tmp_path / "packed.pt"), state)
    try:
        loaded = load_imported(tmp_path / "packed.pt")
    except CkptError as error:
        assert str(error).endswith("load it with torch, and save it again")
        assert not (tmp_path / "imported").exists()
    else:
        assert_same_tensors(loaded, state)


def test_a_compressed_byte_order_fills_no_memory(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "state.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("state/byteorder", bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(CkptError, match="load it with torch"):
            load_imported(tmp_path / "state.pt")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


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
