"""ckpt-inspect: its output for whole, damaged and unfinished steps, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import ckpt
from ckpt.format import json_records
from ckpt.storage.base.errors import Refused
from ckpt.storage.local.directory import LocalStore
from ckpt.tools import inspect

MODULE = [sys.executable, "-m", "ckpt.tools.inspect"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0, 10 and 20; `frozen` is written in step 0 and deduplicated in the later ones."""
    root = tmp_path_factory.mktemp("repository") / "run"
    frozen = np.arange(20_000, dtype=np.int16)
    weight = np.zeros((100, 50), ml_dtypes.bfloat16)
    for step in (0, 10, 20):
        moving = np.random.default_rng(step).standard_normal(1000)
        state = {"frozen": frozen, "model": {"weight": weight, "tied": weight, "moving": moving}, "epoch": step}
        ckpt.save(state, root, step=step, codec={"model.weight": {"id": "zstd", "level": 1}, "*": "none"})
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """Return a copy of the repository, for a test to damage."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MODULE, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **environment}, timeout=600
    )


def json_of(*arguments: object) -> tuple[int, Any]:
    done = run(*arguments, "--json")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def flip(path: Path, at: int = 50) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def only_file(root: Path, pattern: str) -> Path:
    (found,) = root.glob(pattern)
    return found


def test_steps_are_listed_with_sizes_and_dates(made: Path) -> None:
    done = run(made)
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["step", "created", "(UTC)", "leaves", "raw", "written", "ratio", "generation", "state"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "10", "20"]
    assert all(line.split()[-1] == "ok" for line in lines[1:4])
    assert lines[4] == f"3 steps in {made.as_uri()}"

    code, facts = json_of(made)
    assert code == 0
    assert facts["ok"]
    assert [s["step"] for s in facts["steps"]] == [0, 10, 20]
    first, second = facts["steps"][:2]
    assert first["state"] == "ok"
    assert first["leaves"] == 3
    assert first["raw_bytes"] == 40_000 + 10_000 + 8_000
    assert second["written_bytes"] < first["written_bytes"]
    assert second["generation"] > first["generation"]


def test_leaves_are_listed_with_types_and_shapes(made: Path) -> None:
    done = run(made, 10)
    assert done.returncode == 0
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()[1:4]}
    assert rows["frozen"][1:] == ["int16", "20000", "40.0", "kB", "1.00", "none", "0"]
    assert rows["model.weight"][1:5] == ["bfloat16", "100x50", "10.0", "kB"]
    assert rows["model.weight"][6] == "zstd"
    assert rows["model.moving"][-1] == "10"
    assert "model.tied is tied to model.weight" in done.stdout
    assert "1 plain value" in done.stdout

    code, facts = json_of(made, 10)
    assert code == 0
    leaves = {leaf["name"]: leaf for leaf in facts["leaves"]}
    assert leaves["frozen"]["written_in"] == [0]
    assert leaves["model.weight"]["shape"] == [100, 50]
    assert leaves["model.weight"]["codecs"] == [{"id": "zstd", "level": 1}]
    assert leaves["model.weight"]["stored_bytes"] < 1000
    assert facts["plain_values"] == 1
    assert facts["tied"] == {"model.tied": "model.weight"}


def test_only_matching_leaves_are_listed(made: Path) -> None:
    _, facts = json_of(made, 10, "--only", "model.mov*", "--only", "epoch")
    assert [leaf["name"] for leaf in facts["leaves"]] == ["model.moving"]
    assert facts["plain_values"] == 1
    _, tied = json_of(made, 10, "--only", "model.tied")
    assert [leaf["name"] for leaf in tied["leaves"]] == ["model.tied"]
    missing = run(made, 10, "--only", "modle.*")
    assert missing.returncode == 1
    assert missing.stderr.startswith("ckpt-inspect: no leaf of step 10")
    assert missing.stdout == ""


def test_verify_reads_all_blocks_and_reports_complete_steps(made: Path) -> None:
    done = run(made, "--verify")
    assert done.returncode == 0
    assert [line.split()[2] for line in done.stdout.splitlines()[:3]] == ["OK"] * 3
    one = run(made, 10, "--verify", "--only", "frozen")
    assert one.returncode == 0
    assert one.stdout.startswith("step 10  OK  40.0 kB of 1 leaf")
    code, facts = json_of(made, "--verify")
    assert code == 0
    assert all(s["verified"] for s in facts["steps"])
    assert "step 0 " in run(made, "--verify", FORCE_COLOR="1").stderr  # the progress bar


def test_an_empty_and_a_missing_repository_are_reported(tmp_path: Path) -> None:
    from ckpt.repository.repository import open_repository

    open_repository(tmp_path / "run").ensure()
    done = run(tmp_path / "run")
    assert done.returncode == 0
    assert done.stdout.startswith("0 steps")
    none = run(tmp_path / "other")
    assert none.returncode == 1
    assert none.stderr.count("\n") == 1
    assert "nothing has been saved" in none.stderr


def test_a_step_of_a_newer_version_is_not_called_damaged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "steps/10/commit.json"
    body = {k: v for k, v in json.loads(path.read_bytes()).items() if k not in ("digest", "kind", "format")}
    monkeypatch.setattr(json_records, "FORMAT_VERSION", 2)
    path.write_bytes(json_records.encode("commit", body))
    status, facts = json_of(root)
    assert status == 1
    assert [s["state"] for s in facts["steps"]] == ["ok", "unreadable", "ok"]


def test_a_step_without_read_permission_is_not_called_damaged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(store: LocalStore, name: str) -> None:
        raise Refused(f"opening {name} failed")

    for name in ("open", "open_once"):
        monkeypatch.setattr(LocalStore, name, refused)
    done = CliRunner().invoke(inspect.command, [str(root), "20", "--verify", "--json"], standalone_mode=False)
    assert done.return_value == 1
    assert json.loads(done.stdout)["state"] == "unreadable"


def test_names_cannot_drive_the_terminal(tmp_path: Path) -> None:
    ckpt.save({"a\x1b[31m": np.arange(3), "[red]b": np.arange(2)}, tmp_path / "run", step=0)
    done = run(tmp_path / "run", 0)
    assert "\x1b" not in done.stdout
    assert "a\\x1b[31m" in done.stdout
    assert "[red]b" in done.stdout


def test_verify_finds_a_flipped_bit_in_a_pack(root: Path) -> None:
    pack = only_file(root, "steps/10/pack/*.pack")
    flip(pack)
    assert run(root).returncode == 0  # the lengths are right: only --verify reads the blocks
    done = run(root, "--verify")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line.split()[2] for line in lines[:3]] == ["OK", "DAMAGED", "OK"]
    assert "model.moving" in lines[1] or "model.weight" in lines[1]
    assert pack.name in lines[1]
    assert run(root, 10, "--verify").returncode == 1
    assert run(root, 20, "--verify").returncode == 0
    code, facts = json_of(root, "--verify")
    assert code == 1
    assert not facts["ok"]
    assert [s["verified"] for s in facts["steps"]] == [True, False, True]
    assert pack.name in facts["steps"][1]["problems"][0]


def test_a_missing_shared_pack_damages_each_of_its_steps(root: Path) -> None:
    pack = only_file(root, "steps/0/pack/*.pack")
    pack.unlink()
    done = run(root)
    assert done.returncode == 1
    assert [line.split()[-1] for line in done.stdout.splitlines()[1:4]] == ["incomplete"] * 3
    assert f"step 20: steps/0/pack/{pack.name} is missing" in done.stdout
    leaves = run(root, 10)
    assert leaves.returncode == 1
    rows = {line.split()[0]: line for line in leaves.stdout.splitlines()}
    assert rows["frozen"].endswith("file missing")
    assert not rows["model.moving"].endswith("file missing")
    verified = run(root, "--verify")
    assert verified.returncode == 1
    assert "frozen" in verified.stdout
    assert verified.stdout.count("DAMAGED") == 3


def test_a_truncated_pack_is_reported(root: Path) -> None:
    os.truncate(only_file(root, "steps/10/pack/*.pack"), 100)
    done = run(root)
    assert done.returncode == 1
    assert "has 100 bytes instead of" in done.stdout


@pytest.mark.parametrize("pattern", ["manifest/*.parquet", "manifest/*.json"])
def test_a_damaged_manifest_or_state_tree_is_reported(pattern: str, root: Path) -> None:
    file = only_file(root, f"steps/10/{pattern}")
    flip(file)
    done = run(root, 10)
    assert done.returncode == 1
    assert file.name in done.stdout
    assert "Traceback" not in done.stderr
    verified = run(root, "--verify")
    assert verified.returncode == 1
    assert [line.split()[2] for line in verified.stdout.splitlines()[:3]] == ["OK", "DAMAGED", "OK"]
    code, facts = json_of(root, 10)
    assert code == 1
    assert facts["state"] == "damaged"


@pytest.mark.parametrize("content", [None, b"", b"[]", b"not json", b"\xff\xfe"])
def test_a_damaged_commit_record_is_reported(content: bytes | None, root: Path) -> None:
    record = root / "steps/10/commit.json"
    if content is None:
        flip(record)
    else:
        record.write_bytes(content)
    for arguments in ([], [10], ["--verify"], [10, "--verify"]):
        done = run(root, *arguments)
        assert done.returncode == 1
        assert "steps/10/commit.json" in done.stdout
        assert done.stderr == ""
    code, facts = json_of(root)
    assert code == 1
    assert [s["state"] for s in facts["steps"]] == ["ok", "damaged", "ok"]


def test_a_deleted_step_whose_blocks_are_in_use_is_not_listed(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, every=1, keep=1, group=None) as ck:
        for step in range(3):
            ck.save(step, {"frozen": np.arange(50_000.0)}, blocking=True)
    assert list((tmp_path / "steps/0/pack").iterdir())
    done = run(tmp_path)
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["2", "1"], (
        "the listing does not have the step and the number of steps"
    )
    assert "no commit record" not in done.stdout


def test_an_unfinished_step_is_listed_as_such(root: Path) -> None:
    (root / "steps/20/commit.json").unlink()
    done = run(root)
    assert done.returncode == 0  # the step may be one that is being saved
    assert done.stdout.splitlines()[3].split()[-1] == "unfinished"
    assert "no commit record" in done.stdout
    assert run(root, "--verify").returncode == 0
    one = run(root, 20)
    assert one.returncode == 1
    assert "no commit record" in one.stdout


def test_a_step_whose_deletion_was_interrupted_is_listed_as_such(tmp_path: Path) -> None:
    program = (
        "import sys, ckpt\nwith ckpt.Checkpointer(sys.argv[1], every=1, keep=1, group=None) as ck:\n"
        "    for step in range(2):\n        ck.save(step, {'step': step}, blocking=True)"
    )
    environment = {**os.environ, "CKPT_FAILPOINTS": "delete.files=kill@2"}
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, timeout=600)
    assert killed.returncode == -signal.SIGKILL
    assert ckpt.open(tmp_path).steps() == [1]
    assert "step 0: no commit record: a save still runs, or a save or a deletion was interrupted (" in run(tmp_path).stdout


def test_wrong_usage_of_inspect_is_refused(made: Path) -> None:
    assert "Examples:" in run("--help").stdout
    assert run().returncode == 2
    assert run(made, "ten").returncode == 2
    assert run(made, "--only", "a").returncode == 2
    missing = run(made, 30)
    assert missing.returncode == 1
    assert missing.stderr.endswith("has no committed step 30; it has steps 0, 10, 20\n")


def test_a_closed_pipe_ends_inspect_quietly(made: Path) -> None:
    # The reader has closed the pipe before the first write.
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*MODULE, str(made)], stdout=write, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


def test_each_console_script_runs() -> None:
    for name in ("ckpt-inspect", "ckpt-restore"):
        script = Path(sys.executable).with_name(name)
        done = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=600)
        assert done.stdout.strip() == f"{name}, version {ckpt.__version__}"


def verify_subset(root: Path, state: Path, share: str, *step: str) -> tuple[int, dict[str, Any], list[int]]:
    """Return the exit status, the facts of the subset, and the damaged steps."""
    done = run(root, *step, "--verify", "--subset", share, "--json", XDG_STATE_HOME=str(state))
    assert done.stderr == ""
    found = json.loads(done.stdout)
    return done.returncode, found["subset"], [facts["step"] for facts in found["steps"] if facts["state"] == "damaged"]


def test_subsets_verify_the_whole_repository_one_after_the_other(root: Path, tmp_path: Path) -> None:
    flip(root / next(row.pack for row in ckpt.open(root)[20].manifest().rows if row.leaf == "frozen" and row.pack))
    runs = [verify_subset(root, tmp_path / "state", "20%") for _ in range(5)]
    assert all(facts["blocks"] < facts["of_blocks"] for _, facts, _ in runs)
    assert sum(facts["read_bytes"] for _, facts, _ in runs) >= runs[0][1]["of_bytes"]
    assert {status for status, _, _ in runs} == {0, 1}, "the damaged block is not in some subsets only"
    assert all(damaged in ([], [0, 10, 20]) for _, _, damaged in runs), "a step that refers to the damaged block is not named"


def test_a_subset_of_one_step_can_be_all_of_it(root: Path, tmp_path: Path) -> None:
    status, facts, _ = verify_subset(root, tmp_path / "state", "100%", "10")
    assert (status, facts["blocks"], facts["read_bytes"]) == (0, facts["of_blocks"], facts["of_bytes"])
    assert "of 1 step" in run(root, 10, "--verify", "--subset", "50", XDG_STATE_HOME=str(tmp_path / "state")).stdout


def test_a_subset_is_verified_where_its_position_cannot_be_stored(root: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder")
    done = run(root, "--verify", "--subset", "100%", XDG_STATE_HOME=str(tmp_path / "state"))
    assert done.returncode == 0
    assert "can't write" in done.stderr


@pytest.mark.parametrize("arguments", [["--subset", "5%"], ["--verify", "--subset", "0%"], ["--verify", "--subset", "x"]])
def test_an_invalid_subset_is_refused(root: Path, arguments: list[str]) -> None:
    assert run(root, *arguments).returncode == 2
