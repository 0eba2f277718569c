"""ckpt-import: contents with a part that is missing, or of another type, give an error with advice or a state."""

from __future__ import annotations

import argparse
import collections
import json
import pickle
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.forged_values import STRANGE, STRANGE_JSON, forgeries
from helpers.tensorflow_indexes import encode_index

from ckpt.state.boxes import whole_box
from ckpt.state.tree import flatten
from ckpt.storage.base.errors import CkptError
from ckpt.tools.import_files import FileLeaf
from ckpt.tools.import_formats import read_source
from ckpt.tools.import_step import command

Write = Callable[[Any], object]
Case = tuple[Any, Write, Path]
"""The contents of a file, what writes others in their place, and the source."""
ONES = torch.ones(8)


def read_all(source: Path) -> None:
    """Read the state of a source, and all its arrays, as ckpt-import does."""
    for leaf in flatten(read_source(source, None)).leaves.values():
        if isinstance(leaf, FileLeaf):
            leaf.read(whole_box(leaf.shape), np.empty(leaf.nbytes, np.uint8))


def foreign_error(source: Path) -> str:
    """Return the error of a read that is not a CkptError; an empty text if there is none."""
    try:
        read_all(source)
    except CkptError as error:
        return "" if str(error) else "an error without a message"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def to_json(path: Path) -> Write:
    return lambda value: path.write_text(json.dumps(value))


def to_pickle(path: Path, protocol: int = 4) -> Write:
    return lambda value: path.write_bytes(pickle.dumps(value, protocol))


def to_torch(path: Path) -> Write:
    return lambda value: torch.save(value, path)


def safetensors(folder: Path) -> Case:
    def write(header: Any) -> None:
        text = json.dumps(header).encode()
        (folder / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(25))

    header = {
        "__metadata__": {"format": "pt", "tied": '{"c": "a"}'},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "I8", "shape": [], "data_offsets": [24, 25]},
        "empty": {"dtype": "I8", "shape": [0, 3], "data_offsets": [25, 25]},
    }
    return header, write, folder / "x.safetensors"


def index_of_files(folder: Path) -> Case:
    torch.save({"a": ONES}, folder / "a.bin")
    path = folder / "pytorch_model.bin.index.json"
    return {"weight_map": {"a": "a.bin"}}, to_json(path), path


def file_of_torch(folder: Path) -> Case:
    return {"a": ONES, "b": [1, ONES], "c": {"d": torch.nn.Parameter(ONES)}}, to_torch(folder / "x.pt"), folder / "x.pt"


def folder_of_dcp(folder: Path) -> Case:
    dcp.save({"w": {"a": torch.ones(2, 3), "l": [torch.ones(2), 5]}}, checkpoint_id=folder, no_dist=True)
    return pickle.loads((folder / ".metadata").read_bytes()), to_pickle(folder / ".metadata"), folder


def folder_of_megatron(folder: Path) -> Case:
    dcp.save({"w": torch.ones(2, 3)}, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    common = {
        "args": argparse.Namespace(a=1, b="x"), "d": collections.defaultdict(list, {"a": 1}), "n": np.ones(2),
    }  # fmt: skip
    return common, to_torch(folder / "common.pt"), folder


OPTIMIZER = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": ONES}}, "param_groups": [{"lr": 0.1, "params": [0]}],
}  # fmt: skip
SHAPES = [{"a": torch.Size([2, 3]), "b": torch.Size([2])}]
MODEL_OF_STAGE_3 = {
    "module": {"buffer": ONES}, "param_shapes": SHAPES, "buffer_names": ["buffer"], "global_steps": 3,
    "frozen_param_shapes": {"f": torch.Size([2])}, "frozen_param_fragments": {"f": ONES},
}  # fmt: skip


def stage_1(folder: Path) -> tuple[Case, Case]:
    model = {
        "module": {"a": ONES, "b": ONES, "buffer": ONES}, "param_shapes": SHAPES, "global_steps": 3,
        "shared_params": {"c": "a"},
    }  # fmt: skip
    optimizer = {
        "partition_count": [1], "param_alignment_paddings": [[0, 0]], "base_optimizer_state": OPTIMIZER,
        "single_partition_of_fp32_groups": [ONES],
    }  # fmt: skip
    return _stages(folder, folder / "mp_rank_00_model_states.pt", model, {"optimizer_state_dict": optimizer})


def stage_3(folder: Path) -> tuple[Case, Case]:
    optimizer = {"partition_count": 1, "optimizer_state_dict": OPTIMIZER, "fp32_flat_groups": [ONES]}
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    return _stages(folder, path, MODEL_OF_STAGE_3, {"optimizer_state_dict": optimizer})


def _stages(folder: Path, model_file: Path, model: Any, optimizer: Any) -> tuple[Case, Case]:
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    to_torch(model_file)(model)
    to_torch(path)(optimizer)
    return (model, to_torch(model_file), folder), (optimizer, to_torch(path), folder)


def universal_stage_3(folder: Path) -> tuple[Case, Case]:
    for name, size in (("a", 6), ("b", 2)):
        (folder / "zero" / name).mkdir(parents=True)
        for state in ("fp32", "exp_avg"):
            torch.save(torch.ones(size), folder / "zero" / name / f"{state}.pt")
    optimizer = {"partition_count": 1, "optimizer_state_dict": OPTIMIZER}
    paths = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", folder / "zero" / "optimizer_state.pt"
    to_torch(paths[0])(MODEL_OF_STAGE_3)
    to_torch(paths[1])(optimizer)
    return (MODEL_OF_STAGE_3, to_torch(paths[0]), folder), (optimizer, to_torch(paths[1]), folder)


def universal(folder: Path) -> Case:
    parts = {"exp_avg": {"param": ONES}, "fp32": {"param": ONES}, "step": 3}
    (folder / "zero" / "a").mkdir(parents=True)

    def write(found: dict[str, Any]) -> None:
        for name in parts:
            torch.save(found[name], folder / "zero" / "a" / f"{name}.pt")

    return parts, write, folder


ARRAY = np.ones((2, 3), np.float32)


def folder_of_paddle(folder: Path) -> tuple[Case, Case]:
    model = {"w": ARRAY, "pair": ("w_0", ARRAY), "StructuredToParameterName@@": {"w": "w_0"}}
    optimizer = {"w_0_moment1_0": ARRAY, "master_weights": {"w_0": ARRAY}, "LR_Scheduler": {"last": 1}}
    paths = folder / "x.pdparams", folder / "x.pdopt"
    to_pickle(paths[0])(model)
    to_pickle(paths[1])(optimizer)
    return (model, to_pickle(paths[0]), folder), (optimizer, to_pickle(paths[1]), folder)


def large_arrays_of_paddle(folder: Path) -> tuple[Case, Case]:
    split = {
        "w@1": np.ones(4, np.float32), "w@2": np.ones(2, np.float32),
        "UnpackBigParamInfor@@": {"w": {"slices": ["w@1", "w@2"], "OriginShape": [2, 3]}},
    }  # fmt: skip
    paths = folder / "x.pdparams", folder / "y.pdparams"
    return (split, to_pickle(paths[0]), paths[0]), (split, to_pickle(paths[1], 2), paths[1])


def record(kind: str, **fields: Any) -> Any:
    """Return an object of a class of the metadata of Paddle, which is not installed here."""
    module = sys.modules[_RECORDS]
    if not hasattr(module, kind):
        setattr(module, kind, type(kind, (), {"__module__": _RECORDS}))
    made = getattr(module, kind)()
    made.__dict__.update(fields)
    return made


_RECORDS = "paddle.distributed.checkpoint.metadata"


def distributed_paddle(folder: Path) -> tuple[Case, Case]:
    def part(offset: tuple[int, ...], shape: tuple[int, ...], **flat: Any) -> Any:
        return record(
            "LocalTensorMetadata", global_offset=offset, local_shape=shape, dtype="float32", global_shape=shape, **flat
        )

    flat = {"is_flattened": True, "flattened_range": (0, 6)}
    stored = {
        record("LocalTensorIndex", tensor_key="a.w", global_offset=(0, 0)): "0_0.distcp",
        record("LocalTensorIndex", tensor_key="o", global_offset=(0,), **flat): "0_0.distcp",
    }
    tensors = {"a.w": [part((0, 0), (2, 3))], "o": [part((0,), (6,), **flat)]}
    places = {"a.w": ("model", "w"), "o": ("optimizer", "w_0_moment1_0")}
    metadata = record("Metadata", state_dict_metadata=tensors, storage_metadata=stored, flat_mapping=places)
    files = {"a.w": ARRAY, "o": np.ones(6, np.float32), "StructuredToParameterName@@": {"a.w": "w_0"}}
    paths = folder / "0.metadata", folder / "0_0.distcp"
    to_pickle(paths[0])(metadata)
    to_pickle(paths[1])(files)
    return (metadata, to_pickle(paths[0]), folder), (files, to_pickle(paths[1]), folder)


def index_of_tensorflow(folder: Path) -> Case:
    (folder / "x.data-00000-of-00001").write_bytes(bytes(24) + b"\x02" + bytes(4) + b"ab")
    entries = {
        "": {1: 1, 2: 0}, "w": {1: 1, 2: {2: [{1: 2}, {1: 3}]}, 3: 0, 4: 0, 5: 24}, "s": {1: 7, 2: {}, 4: 24, 5: 7},
    }  # fmt: skip
    return entries, lambda found: (folder / "x.index").write_bytes(encode_index(found)), folder / "x.index"


CASES = (
    safetensors, index_of_files, file_of_torch, folder_of_dcp, folder_of_megatron, stage_1, stage_3, universal_stage_3,
    universal, folder_of_paddle, large_arrays_of_paddle, distributed_paddle, index_of_tensorflow,
)  # fmt: skip


@pytest.fixture
def paddle_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `record` make classes in modules of Paddle."""
    for name in ("paddle", "paddle.distributed", "paddle.distributed.checkpoint", _RECORDS):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


@pytest.mark.usefixtures("paddle_records")
@pytest.mark.parametrize("make", CASES)
def test_a_part_of_the_contents_is_forged(make: Callable[[Path], Any], tmp_path: Path) -> None:
    made = make(tmp_path)
    for whole, write, source in made if isinstance(made[0], tuple) else (made,):
        write(whole)
        read_all(source)
        read = 0
        found: dict[str, Any] = {}
        for forged in forgeries(whole, STRANGE_JSON if make in (safetensors, index_of_files) else STRANGE):
            try:
                write(forged)
            except Exception:  # the file can't have it
                continue
            read += 1
            if error := foreign_error(source):
                found.setdefault(error, forged)
        assert read > 25
        assert not list(found)
        write(whole)


def write_archive(path: Path, records: dict[str, bytes]) -> None:
    """Write records in the layout of torch.save, from which torch.load computes where they are."""
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in records.items():
        if name not in ("version", ".data/serialization_id"):  # the writer adds them
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()


@pytest.mark.parametrize("reports_storage_offsets", [True, False], ids=["torch reports places", "torch before 2.7"])
def test_a_byte_of_the_pickle_of_torch_save_is_forged(
    reports_storage_offsets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.tools.import_torch.reports_storage_offsets", lambda torch: reports_storage_offsets)
    torch.save({"a": ONES, "b": [1, torch.ones(6, 8)[1:3, 2:5].T]}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
        records = {name.removeprefix("whole/"): archive.read(name) for name in archive.namelist()}
    name = "data.pkl"
    whole = records[name]
    changed = [whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for at in range(len(whole)) for bit in (1, 4)]
    nested = [b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"." for levels in (450, 900, 5000)]
    recursive: list[Any] = []
    recursive.append(recursive)
    found = {}
    for content in [whole, *changed, *nested, pickle.dumps(recursive, 2)]:
        write_archive(tmp_path / "forged.pt", records | {name: content})
        if content is whole:
            read_all(tmp_path / "forged.pt")
        if error := foreign_error(tmp_path / "forged.pt"):
            found[error] = content
    assert not list(found)
    with zipfile.ZipFile(tmp_path / "empty.pt", "w"):
        pass
    assert not foreign_error(tmp_path / "empty.pt")


@pytest.mark.usefixtures("paddle_records")
@pytest.mark.parametrize("keys", [("model", "w", "inner"), ("model", "w"), ("model",)])
def test_a_tensor_of_paddle_in_the_place_of_another_is_refused(keys: tuple[str, ...], tmp_path: Path) -> None:
    (metadata, write, source), _ = distributed_paddle(tmp_path)
    metadata.flat_mapping["o"] = keys
    write(metadata)
    with pytest.raises(CkptError, match="o has the keys of another tensor, so the metadata is damaged: copy it again"):
        read_all(source)


@pytest.mark.parametrize("options", [("--only", "a*"), ("--strip", "a."), ()])
def test_a_state_that_is_nested_too_deeply_is_refused(options: tuple[str, ...], tmp_path: Path) -> None:
    _, write, source = index_of_tensorflow(tmp_path)
    write({"": {1: 1}, "a/" * 5000 + "w/.ATTRIBUTES/VARIABLE_VALUE": {1: 1, 2: {2: [{1: 2}]}, 5: 8}})
    with pytest.raises(CkptError, match="nested too deeply"):
        command.main([str(source), str(tmp_path / "imported"), *options], standalone_mode=False)
