"""Models in torch's own parallelisms, saved in one and loaded into another; and torch.distributed.checkpoint on our packs.

The ranks are real ones, started by torchrun; what they check is in torch_program.py. A launch costs seconds, so that each
makes many checks.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import SOAK, TESTS

import ckpt

torch = pytest.importorskip("torch")

import torch_program  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from ckpt.adapters.dcp import Reader, Writer  # noqa: E402
from ckpt.adapters.torch import ModelState  # noqa: E402

EXAMPLES = TESTS.parent / "examples"
SMALL = ["--width=16", "--layers=1"]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux has them"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not re.match(r"RANK|WORLD_SIZE|OMPI_|PMI|SLURM_|TORCHELASTIC", k)}
    return kept | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | more


def torchrun(size: int, program: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """How the ranks ended. None of them outlives the call."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command = [*launcher, str(program), *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment(**more), stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def check(size: int, root: Path, *checks: str) -> None:
    """Run checks of torch_program.py, all in one launch; each rank must come to the end of each."""
    done = torchrun(size, TESTS / "torch_program.py", str(root), *checks)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    ended = [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]
    assert len(ended) == size * len(checks), done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Repositories that four ranks have written, one for each layout."""
    root = tmp_path_factory.mktemp("torch")
    ours = ("save_layouts", "load_layouts", "pipeline", "sharded_tensor", "save_meshes")
    check(4, root, *ours, "dcp_save", "dcp_load", "dcp_of_ours", "dcp_refused")
    return root


def test_four_ranks_in_every_layout(root: Path) -> None:
    assert ckpt.open(root / "fsdp")[2].commit.world_size == 4


def test_two_ranks_load_what_four_saved(root: Path) -> None:
    check(2, root, "load_layouts", "load_meshes", "dcp_load")


def test_one_process_loads_what_four_saved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_program, "ROOT", root)
    torch_program.load_layouts()
    torch_program.dcp_load()


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="by make soak: eight processes")
def test_eight_ranks_on_a_cube(tmp_path: Path) -> None:
    check(8, tmp_path, "save_meshes")
    check(2, tmp_path, "load_meshes")


# --- ModelState in one process ---------------------------------------------------------------------------------


def trained(steps: int = 2) -> tuple[Any, Any]:
    model = torch_program.make_model()
    optimizer = torch_program.make_optimizer(model)
    torch_program.train(model, optimizer, steps)
    return model, optimizer


def test_wrappers_leave_the_names_alone(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, optimizer = trained()
    model["layer1"] = checkpoint_wrapper(model["layer1"])
    model["layer2"] = torch.compile(model["layer2"])  # not called, so that nothing is compiled
    ckpt.save(ModelState(model, optimizer), tmp_path)
    plain, fresh = torch_program.sharded("plain")
    ckpt.load(tmp_path, ModelState(plain, fresh))
    reference = torch_program.everything(*trained())
    torch_program.same(torch_program.everything(plain, fresh), reference, "wrapped into plain")


def test_an_optimizer_without_state_stays_so(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    state = {"train": ModelState(model, optimizer)}
    ckpt.save(state, tmp_path)
    assert not optimizer.state
    torch_program.train(model, optimizer)
    torch_program.same(torch_program.everything(model, optimizer), torch_program.everything(*trained()), "after a save")
    ckpt.load(tmp_path, state)
    assert not optimizer.state
    torch_program.train(model, optimizer)
    assert torch.equal(model["layer0"].up.weight, trained()[0]["layer0"].up.weight)


def test_two_optimizers_become_one_and_options_follow_the_names(tmp_path: Path) -> None:
    model, _ = trained()
    first = torch.optim.SGD(model["layer0"].parameters(), lr=0.5, momentum=0.9)
    rest = torch.optim.SGD([p for i in (1, 2, 3) for p in model[f"layer{i}"].parameters()], lr=0.5, momentum=0.9)
    model["layer3"].norm.bias.requires_grad_(False)  # gets no state
    torch_program.forward(model, torch.ones(2, torch_program.WIDTH)).sum().backward()
    first.step()
    rest.step()
    ckpt.save({"train": ModelState(model, [first, rest])}, tmp_path)
    other = torch_program.make_model(seed=1)
    one = torch.optim.SGD(list(other.parameters())[::-1], lr=9.0, momentum=0.1)
    ckpt.load(tmp_path, {"train": ModelState(other, one)})
    assert (one.param_groups[0]["lr"], one.param_groups[0]["momentum"]) == (0.5, 0.9)
    names = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, names[name])
        have = (first.state | rest.state).get(names[name], {})
        assert one.state.get(parameter, {}).keys() == have.keys(), name
        assert all(torch.equal(one.state[parameter][key], have[key]) for key in have)
    first.param_groups[0]["lr"] = 0.25
    ckpt.save({"train": ModelState(model, [first, rest])}, tmp_path)
    with pytest.raises(ckpt.LeafMismatch, match="were saved with different options"):
        ckpt.load(tmp_path, {"train": ModelState(other, one)})


def test_moments_wider_than_the_parameters_are_kept(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 3).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters())
    for parameter in layer.parameters():
        wide = torch.randn(parameter.shape)
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": wide, "exp_avg_sq": wide.square()}
    ckpt.save(ModelState(layer, optimizer), tmp_path)
    other = torch.nn.Linear(3, 3).to(torch.bfloat16)
    fresh = torch.optim.AdamW(other.parameters())
    ckpt.load(tmp_path, ModelState(other, fresh))
    assert fresh.state[other.weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[layer.weight]["exp_avg"])


def test_a_part_is_loaded_and_what_is_missing_is_named(tmp_path: Path) -> None:
    model, optimizer = trained()
    ckpt.save({"train": ModelState(model, optimizer)}, tmp_path)
    other, fresh = torch_program.sharded("plain")
    ckpt.load(tmp_path, {"train": ModelState(other, fresh)}, only="train.model.layer1")
    assert not fresh.state
    assert torch.equal(other["layer1"].up.weight, model["layer1"].up.weight)
    assert not torch.equal(other["layer2"].up.weight, model["layer2"].up.weight)
    other["new"] = torch.nn.Linear(2, 2)
    before = torch_program.everything(other, fresh)
    with pytest.raises(ckpt.LeafNotFound, match=r"leaf train.model.new.weight of `like` is not in step 0"):
        ckpt.load(tmp_path, {"train": ModelState(other, fresh)})
    torch_program.same(torch_program.everything(other, fresh), before, "a refused load")
    with pytest.raises(ckpt.InvalidArgument, match="none of the model's"):
        ckpt.save(ModelState(other, torch.optim.SGD(model.parameters())), tmp_path)


# --- DCP in one process ----------------------------------------------------------------------------------------


def test_dcp_keeps_any_state_and_loads_any_step(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    def state(on: int) -> dict[str, Any]:
        return {
            "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16) * on, "scalar": torch.tensor(2.5) * on,
            "none": torch.zeros(0, 4), "list": [torch.ones(3) * on, {"deep": torch.full((2,), 7) * on}, 5 * on],
            "tuple": (1 * on, "x"), "step": on, "pickled": np.arange(20_000) * on, "text": "run" if on else "",
        }  # fmt: skip

    writer = pickle.loads(pickle.dumps(Writer(str(tmp_path), keep=2)))  # as for a save in another process
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
    assert len(ours["pickled"].data) > 8 * 20_000  # as torch.save wrote it, unopened
    made: dict[str, Any] = {}
    _load_state_dict(made, storage_reader=Reader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert torch.equal(made["list"][1]["deep"], want["list"][1]["deep"])
    # Into tensors of another type and place, as torch's own reader does it.
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


def test_dcp_is_told_what_is_wrong(tmp_path: Path) -> None:
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


# --- examples --------------------------------------------------------------------------------------------------


def test_the_fsdp_example_goes_on_after_a_kill(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    arguments = [str(tmp_path / "run"), "--losses", str(log), "--steps=7", "--every=2", "--context=16", "--batch=4", *SMALL]
    killed = torchrun(2, EXAMPLES / "fsdp.py", *arguments, CKPT_FAILPOINTS="save.commit=kill@2")
    assert killed.returncode != 0
    first = [json.loads(line) for line in log.read_text().splitlines()]
    assert ckpt.open(tmp_path / "run").steps() == [1]
    done = torchrun(2, EXAMPLES / "fsdp.py", *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    second = [json.loads(line) for line in log.read_text().splitlines()[len(first) :]]
    assert [line["step"] for line in second] == [2, 3, 4, 5, 6]
    bits = {line["step"]: line["bits"] for line in second}
    assert len(first) > 3
    assert all(bits[line["step"]] == line["bits"] for line in first[2:])


def test_a_dcp_script_changes_two_lines(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "--every=2", *SMALL]
    done = torchrun(2, EXAMPLES / "dcp_swap.py", *arguments, "--steps=4")
    assert done.returncode == 0, done.stderr[-4000:]
    assert ckpt.open(tmp_path).steps() == [1, 3]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, str(EXAMPLES / "dcp_swap.py"), *arguments, "--steps=6"]
    again = subprocess.run(command, env=environment(**alone), capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr[-4000:]
    assert re.findall(r"step +(\d+)", again.stdout) == ["4", "5"]
    assert ckpt.open(tmp_path).steps() == [3, 5]
    lines = [line for line in (EXAMPLES / "dcp_swap.py").read_text().splitlines() if "# was" in line]
    assert len(lines) == 2


MEETS = """
import json, os, torch
torch.distributed.init_process_group("gloo")
sum = torch.ones(1) * (1 + torch.distributed.get_rank())
torch.distributed.all_reduce(sum)
told = {name: value for name, value in os.environ.items() if name.startswith(("TORCH", "ROLE_", "GROUP_"))}
with open(os.environ["RANK"] + ".json", "w") as file:
    json.dump([sum.item(), told], file)
os._exit(3 if os.environ["CKPT_ATTEMPT"] == "0" else 0)  # else gloo's thread may need the GIL that is gone, and abort
"""


def test_ckpt_run_under_torchrun(tmp_path: Path) -> None:
    """What the outer torchrun has told is not meant for the ranks: they meet at a store of their own, after a restart too."""
    run = [sys.executable, "-m", "ckpt.tools.run", "--launcher", "torchrun", "-n", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python", *run]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", MEETS], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        sum, told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert sum == 3
        assert told["TORCHELASTIC_RESTART_COUNT"] == "1"
        assert told["TORCHELASTIC_MAX_RESTARTS"] == "10"
        assert (told["ROLE_RANK"], told["ROLE_NAME"], told["TORCHELASTIC_ERROR_FILE"]) == (str(rank), "default", "")
