"""Files that an older commit wrote: repositories, a namespace and the folder of a run. They are read, written on and repaired.

tests/fixtures/write_all_files.py has written them.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.folders import TESTS
from helpers.rank_threads import all_well, on_ranks
from helpers.states import assert_same

import ckpt
from ckpt.aggregator.file_io.namespace import open_namespace
from ckpt.aggregator.maintenance.repair import repair_namespace
from ckpt.aggregator.maintenance.scrub import scrub_namespace

FIXTURES = TESTS / "fixtures"
WRITER = runpy.run_path(str(FIXTURES / "write_all_files.py"))
STEPS: tuple[int, ...] = WRITER["STEPS"]
KEY = bytes.fromhex(WRITER["KEY"])
COMMITS = ["a100607"]


@pytest.fixture(params=COMMITS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder with the files that a commit wrote."""
    with zipfile.ZipFile(FIXTURES / f"all_files_{request.param}.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def state_of(step: int) -> dict[str, Any]:
    found: dict[str, Any] = WRITER["state_of"](step)
    return found


def command(name: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"ckpt.tools.{name}", *map(str, words)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["plain", "signed"])
def test_a_repository_is_read_written_on_and_verified(old: Path, name: str) -> None:
    url, key = old / name, KEY if name == "signed" else None
    for step in STEPS:
        assert_same(ckpt.load(url, step=step, key=key), state_of(step))
    packs = {file.name for file in ckpt.open(url, key=key)[STEPS[-1]].commit.packs}
    ckpt.save(state_of(9), url, 9, key=key)
    assert packs & {file.name for file in ckpt.open(url, key=key)[9].commit.packs}, "equal blocks are not written again"
    with ckpt.Checkpointer(url, keep=2, key=key) as saver:
        state, start = saver.restore(state_of(0))
        assert start == 10
        assert_same(state, state_of(9))
        saver.save(10, state_of(10), blocking=True)
    assert ckpt.open(url, key=key).steps() == [9, 10]
    (old / "key").write_text(WRITER["KEY"])
    done = command("inspect", url, "--verify", *(["--key-file", old / "key"] if key else []))
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (9, 10):
        assert_same(ckpt.load(url, step=step, key=key), state_of(step))


def test_a_repository_of_ranks_is_loaded_by_another_number_of_ranks(old: Path) -> None:
    url = old / "ranks"
    for step in STEPS:
        whole = np.concatenate([WRITER["rows_of"](rank, step) for rank in range(2)])
        assert_same(ckpt.load(url, step=step), {"rows": whole, "step": step})

    def go_on(group: Any) -> None:
        rows = np.zeros((16, 33))
        shard = ckpt.Shard(rows, (64, 33), (16 * group.rank, 0))
        ckpt.load(url, {"rows": shard, "step": 0}, group=group)
        ckpt.save({"rows": shard, "step": 4}, url, 4, group=group)

    all_well(on_ranks(4, go_on))
    assert_same(ckpt.load(url), {"rows": whole, "step": 4})


def test_a_namespace_is_read_written_on_and_repaired(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = old / "namespace"
    config = old / "config.toml"
    config.write_text(WRITER["NAMESPACE"].format(folder=folder, redundancy="2x"))
    monkeypatch.setenv("CKPT_CONFIG", str(config))
    files = fsspec.filesystem("ckpt", skip_instance_cache=True)
    content = {f"{number}": number for number in range(4)} | {"moved": 5}

    def check() -> None:
        listed = {Path(name).name for name in files.ls("ckpt://old/files", detail=False)}
        assert listed == set(content)
        for name, number in content.items():
            assert files.cat_file(f"ckpt://old/files/{name}") == WRITER["file_content"](number)
        for step in STEPS:
            assert_same(ckpt.load("ckpt://old/run", step=step), state_of(step))

    check()
    files.pipe_file("ckpt://old/files/4", WRITER["file_content"](4))
    content["4"] = 4
    ckpt.save(state_of(4), "ckpt://old/run", 4)
    check()
    namespace, _ = open_namespace("ckpt://old")
    assert scrub_namespace(namespace, verify=True).is_whole
    shutil.rmtree(folder / "disk1" / "objects")
    found = scrub_namespace(namespace, verify=True)
    assert found.damaged_files
    assert not repair_namespace(namespace, found).failed
    assert scrub_namespace(namespace, verify=True).is_whole
    check()
    assert_same(ckpt.load("ckpt://old/run"), state_of(4))


def test_a_run_is_explained_and_continued(old: Path) -> None:
    """The older ckpt-run was killed in its second attempt."""
    run, steps = old / "job" / "run", old / "job" / "steps"
    why = command("run", "why", "--run-dir", run)
    assert "rank 0 exited with status 7" in why.stdout, why.stderr
    ended = command("run", "status", "--run-dir", run)
    assert "start ckpt-run again to continue it" in ended.stdout
    before = ckpt.open(steps).steps()
    program = [sys.executable, old / "job" / "training.py", steps, "8", "0"]
    done = command("run", "--run-dir", run, "--dir", steps, "--", *program)
    assert done.returncode == 0, done.stderr
    assert f"continues at step {before[-1] + 1}" in done.stdout
    assert ckpt.open(steps).steps()[-1] == 7
    assert ckpt.load(steps)["w"][0] == sum(range(8))
    why = command("run", "why", "--run-dir", run)
    assert "rank 0 exited with status 7" in why.stdout
    assert "attempt 2  end  all ranks have ended with success" in why.stdout
