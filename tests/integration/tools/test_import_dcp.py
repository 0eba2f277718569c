"""ckpt-import: folders of torch.distributed.checkpoint become steps with the same bytes; metadata run no code."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.folders import PROGRAMS
from helpers.forked_ranks import run_ranks
from helpers.imports import assert_same_tensors, load_imported

from ckpt.storage.base.errors import CkptError


def test_a_sharded_folder_of_dcp(tmp_path: Path) -> None:
    done = run_ranks(3, PROGRAMS / "dcp_folder.py", str(tmp_path / "dcp"))
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
    assert_same_tensors({**loaded, "model": {k: loaded["model"][k] for k in expected["model"]}}, expected)

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
    assert_same_tensors(load_imported(tmp_path / "dcp"), {"w": torch.arange(6.0)})


def test_getattr_in_metadata_of_dcp_reaches_no_function(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    class Reaches:
        def __reduce__(self) -> Any:
            return getattr, (dcp.metadata.Metadata, "__init__")

    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Reaches()))
    with pytest.raises(CkptError, match="not an enumeration"):
        load_imported(tmp_path / "dcp")


@pytest.mark.parametrize("kind", [str, Path])
def test_metadata_of_dcp_that_change_a_class_read_no_file_outside_of_the_folder(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle can set attributes of each class that it finds. Here it sets Path.parts."""
    import torch.distributed.checkpoint as dcp

    monkeypatch.setattr(Path, "parts", Path.parts)  # restored, also if the import changes it
    before = Path.parts
    for name in ("dcp", "other"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / name, no_dist=True)
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = kind("../other/" + info.relative_path)
    file.write_bytes(b"cpathlib\nPath\n(N}Vparts\n)stb0" + pickle.dumps(metadata))
    with pytest.raises(CkptError, match="is outside of the folder, where no file is read"):
        load_imported(tmp_path / "dcp")
    assert Path.parts is before


def test_large_tensors_of_dcp(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"big": torch.randn(3000, 1001), "transposed": torch.randn(100, 200).T, "tail": torch.arange(3)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded = load_imported(tmp_path / "dcp")
    assert_same_tensors({name: loaded[name] for name in state}, state)


@pytest.mark.parametrize("path", [("w", "inner"), ("w",), ("list", 1 << 40), (), 5, [[]]])
def test_a_path_of_dcp_that_leads_nowhere_is_refused(path: Any, tmp_path: Path) -> None:
    """The metadata has the keys of each value: here they go through a tensor, or are not keys at all."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(2), "x": torch.ones(2), "list": [torch.ones(1)]}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data["x"] = path
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CkptError, match=r"\.metadata is damaged .*: copy the folder again"):
        load_imported(tmp_path / "dcp")
