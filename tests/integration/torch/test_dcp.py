"""torch.distributed.checkpoint on a repository of ckpt."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.folders import EXAMPLES
from helpers.torch_launches import SMALL, torch
from helpers.torchrun import environment, torchrun
from torch.distributed.checkpoint.api import CheckpointException

import ckpt
from ckpt.adapters.dcp import Reader, Writer

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux has them"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def test_dcp_saves_any_state_and_loads_any_step(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    def state(on: int) -> dict[str, Any]:
        return {
            "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16) * on, "scalar": torch.tensor(2.5) * on,
            "none": torch.zeros(0, 4), "list": [torch.ones(3) * on, {"deep": torch.full((2,), 7) * on}, 5 * on],
            "tuple": (1 * on, "x"), "step": on, "pickled": np.arange(20_000) * on, "text": "run" if on else "",
        }  # fmt: skip

    writer = pickle.loads(pickle.dumps(Writer(str(tmp_path), keep=2)))  # pickled as for a save in another process
    dcp.save(state(1), storage_writer=writer)
    got = state(0)
    dcp.load(got, storage_reader=Reader(tmp_path))
    want = state(1)
    for name in ("half", "scalar", "none"):
        assert torch.equal(got[name], want[name])
    assert torch.equal(got["list"][1]["deep"], want["list"][1]["deep"])
    assert (got["list"][2], got["tuple"], got["step"], got["text"]) == (5, (1, "x"), 1, "run")
    assert np.array_equal(got["pickled"], want["pickled"])
    ours = ckpt.load(tmp_path)
    assert torch.equal(ours["list"][0], torch.ones(3))
    assert len(ours["pickled"].data) > 8 * 20_000  # the bytes of torch.save, unchanged
    made: dict[str, Any] = {}
    _load_state_dict(made, storage_reader=Reader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert torch.equal(made["list"][1]["deep"], want["list"][1]["deep"])
    # Into tensors of another type and device, as the reader of torch does it.
    wide = {"half": torch.zeros(3, 2).t()}
    dcp.load(wide, storage_reader=Reader(tmp_path))
    assert torch.equal(wide["half"], want["half"].float())

    dcp.save(state(2), storage_writer=writer, checkpoint_id="7")
    assert ckpt.open(tmp_path).steps() == [0, 7]
    dcp.load(got, storage_reader=Reader(tmp_path), checkpoint_id="0")
    assert got["step"] == 1
    ckpt.save({"half": np.zeros((2, 3), np.float32), "step": 9, "options": {"betas": (0.1, 0.2), 3: 4}}, tmp_path, 8)
    other = {"half": torch.ones(2, 3), "step": 0, "options": {"betas": None, "3": 0}}
    dcp.load(other, storage_reader=Reader(tmp_path))
    assert (other["step"], other["options"], float(other["half"].sum())) == (9, {"betas": (0.1, 0.2), "3": 4}, 0)


def test_dcp_fills_a_lazy_view_with_the_saved_values(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    saved = torch.tensor([1 + 2j, 3 - 4j, 5j])
    dcp.save({"x": saved, "imaginary": saved.imag.clone()}, storage_writer=Writer(tmp_path))
    memory = torch.zeros(3, dtype=torch.complex64)
    negative = torch.zeros(3, dtype=torch.complex64)
    state = {"x": memory.conj(), "imaginary": negative.conj().imag}
    assert (state["x"].is_conj(), state["imaginary"].is_neg()) == (True, True)
    dcp.load(state, storage_reader=Reader(tmp_path))
    assert torch.equal(state["x"].resolve_conj(), saved)
    assert torch.equal(memory, saved.conj().resolve_conj())
    assert torch.equal(state["imaginary"].resolve_neg(), saved.imag)


def test_errors_of_dcp_name_what_is_wrong(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    def failure(work: Callable[[], Any]) -> BaseException:
        with pytest.raises(CheckpointException) as caught:
            work()
        return caught.value.failures[0][0]

    state = {"w": torch.ones(2)}
    assert isinstance(failure(lambda: dcp.load(state, storage_reader=Reader(tmp_path))), ckpt.StepNotFound)
    dcp.save(state, storage_writer=Writer(tmp_path, step=3))
    assert isinstance(failure(lambda: dcp.load(state, storage_reader=Reader(tmp_path, 4))), ckpt.StepNotFound)
    assert isinstance(failure(lambda: dcp.save(state, storage_writer=Writer(tmp_path, step=3))), ckpt.AlreadyExists)
    dcp.save(state, storage_writer=Writer(tmp_path, step=3, overwrite=True))
    assert "w2" in str(failure(lambda: dcp.load({"w2": torch.ones(2)}, storage_reader=Reader(tmp_path))))
    cached = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state, storage_writer=Writer(tmp_path), planner=cached)
    assert isinstance(failure(lambda: dcp.save(state, storage_writer=Writer(tmp_path), planner=cached)), ckpt.InvalidArgument)
    with pytest.raises(ckpt.InvalidArgument, match="give the number of a step"):
        dcp.save(state, storage_writer=Writer(tmp_path), checkpoint_id="run/step-5")
    for manifest in (tmp_path / "steps").rglob("*.parquet"):
        manifest.write_bytes(manifest.read_bytes()[:-1])
    assert isinstance(failure(lambda: dcp.load(state, storage_reader=Reader(tmp_path, 3))), ckpt.IntegrityError)
    assert isinstance(failure(lambda: dcp.load(state, storage_reader=Reader(tmp_path))), ckpt.StepNotFound)


def test_a_long_value_and_a_tensor_with_the_name_of_its_bytes_are_both_saved(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    def state(on: int) -> dict[str, Any]:
        return {"x": np.arange(20_000) * on, "x.data": torch.ones(3) * on, "x.data~": np.arange(30_000) * on}

    dcp.save(state(1), storage_writer=Writer(tmp_path))
    got = state(0)
    dcp.load(got, storage_reader=Reader(tmp_path))
    assert {name: value.tolist() for name, value in got.items()} == {name: value.tolist() for name, value in state(1).items()}


@pytest.mark.parametrize(
    ("name", "state"),
    [("1", {1: torch.zeros(2), "1": torch.ones(2)}), ("a.b", {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}})],
    ids=["keys", "paths"],
)
def test_entries_with_one_name_in_dcp_are_refused(tmp_path: Path, name: str, state: dict[Any, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    ckpt.save(state, tmp_path, 3)
    with pytest.raises(CheckpointException, match=f"step 3 of .* has two entries that DCP calls {name}; load it"):
        dcp.load({name: torch.zeros(2)}, storage_reader=Reader(tmp_path))


def test_a_dcp_script_needs_two_changed_lines(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "--every=2", *SMALL]
    done = torchrun(2, EXAMPLES / "dcp_swap.py", *arguments, "--steps=4")
    assert done.returncode == 0, done.stderr[-4000:]
    assert ckpt.open(tmp_path).steps() == [1, 3]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, str(EXAMPLES / "dcp_swap.py"), *arguments, "--steps=6"]
    again = subprocess.run(command, env=environment(**alone), capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stderr[-4000:]
    assert re.findall(r"step +(\d+)", again.stdout) == ["4", "5"]
    assert ckpt.open(tmp_path).steps() == [3, 5]
    lines = [line for line in (EXAMPLES / "dcp_swap.py").read_text().splitlines() if "# was" in line]
    assert len(lines) == 2
