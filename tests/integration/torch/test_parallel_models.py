"""Models in the parallel layouts of torch, saved in one and loaded into another."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.folders import EXAMPLES, PROGRAMS
from helpers.forked_ranks import run_ranks
from helpers.processes import SOAK
from helpers.torch_launches import SMALL
from helpers.torchrun import torchrun
from programs import torch_rank

import ckpt

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux has them"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def check(size: int, root: Path, *checks: str) -> None:
    """Run checks of torch_rank.py in one launch; each rank must complete each check."""
    done = run_ranks(size, PROGRAMS / "torch_rank.py", str(root), *checks)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    ended = [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]
    assert len(ended) == size * len(checks), done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return repositories that four ranks have written, one for each layout."""
    root = tmp_path_factory.mktemp("torch")
    ours = ("save_layouts", "load_layouts", "pipeline", "sharded_tensor", "save_meshes")
    check(4, root, *ours, "dcp_save", "dcp_load", "dcp_of_ours", "dcp_refused")
    return root


def test_four_ranks_load_every_layout_into_every_layout(root: Path) -> None:
    assert ckpt.open(root / "fsdp")[2].commit.world_size == 4


def test_two_ranks_load_steps_of_four(root: Path) -> None:
    check(2, root, "load_layouts", "load_meshes", "dcp_load")


def test_one_process_loads_steps_of_four(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rank, "ROOT", root)
    torch_rank.load_layouts()
    torch_rank.dcp_load()


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="by make soak: eight processes")
def test_eight_ranks_on_a_cube_save_and_load(tmp_path: Path) -> None:
    check(8, tmp_path, "save_meshes")
    check(2, tmp_path, "load_meshes")


def test_the_fsdp_example_continues_after_a_kill(tmp_path: Path) -> None:
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


MEETS = """
import json, os, torch
torch.distributed.init_process_group("gloo")
sum = torch.ones(1) * (1 + torch.distributed.get_rank())
torch.distributed.all_reduce(sum)
environment = {name: value for name, value in os.environ.items() if name.startswith(("TORCH", "ROLE_", "GROUP_"))}
with open(os.environ["RANK"] + ".json", "w") as file:
    json.dump([sum.item(), environment], file)
os._exit(3 if os.environ["CKPT_ATTEMPT"] == "0" else 0)  # otherwise a thread of gloo may need the GIL that is gone, and abort
"""


def test_ranks_of_ckpt_run_under_torchrun_meet_by_themselves(tmp_path: Path) -> None:
    """The environment of the outer torchrun is not meant for these ranks: they meet at a store of their own, also after a
    restart."""
    run = [sys.executable, "-m", "ckpt.tools.run", "--launcher", "torchrun", "-n", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python", *run]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", MEETS], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        sum, environment = json.loads((tmp_path / f"{rank}.json").read_text())
        assert sum == 3
        assert environment["TORCHELASTIC_RESTART_COUNT"] == "1"
        assert environment["TORCHELASTIC_MAX_RESTARTS"] == "10"
        assert (environment["ROLE_RANK"], environment["ROLE_NAME"], environment["TORCHELASTIC_ERROR_FILE"]) == (
            str(rank),
            "default",
            "",
        )
