"""An older version and this one read and continue what the other wrote, in turns: a repository, a namespace, a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.memory_runs import with_make_soak
from helpers.old_versions import install
from helpers.processes import free_port, until

import ckpt
from ckpt.recovery.ranks import processes

REVISIONS = {"2026-11-25": "a100607", "2026-11-27": "ff7cd4d"}
"""Commits by their dates. The first one is older than the folders of today."""

PROGRAM = str(PROGRAMS / "mixed_versions.py")
MARK = "CKPT_TEST_MIXED_VERSIONS"
NEW = Path(sys.executable).parent


@pytest.fixture(scope="module", params=REVISIONS.values(), ids=REVISIONS)
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the commands of an older version."""
    return install(request.param, tmp_path_factory.mktemp("old"))


def run(version: Path, *command: str) -> str:
    """Run a command of a version, or its Python; return its output. The folder of the commands has no package of ckpt."""
    done = subprocess.run([version / command[0], *command[1:]], capture_output=True, text=True, timeout=600, cwd=version)
    assert done.returncode == 0, f"{version.parent}, {command}: {done.stdout}{done.stderr}"
    return done.stdout


def add_steps(version: Path, url: str | Path, codec: str, last: int, *back: int) -> None:
    """Let a version check all steps, and save further ones up to `last`, after going back to step `back` if it is given."""
    run(version, "python", PROGRAM, "steps", str(url), codec, str(last), *map(str, back))


@with_make_soak
@pytest.mark.parametrize("codec", ["none", "zstd", "lz4", "blosc", "auto"])
def test_versions_continue_a_repository_in_turns(old: Path, codec: str, tmp_path: Path) -> None:
    """Each of them checks every step of the other, and goes back to an older step once."""
    url = tmp_path / "run"
    for number, version in enumerate([old, NEW] * 2, 1):
        add_steps(version, url, codec, 3 * number)
    add_steps(NEW, url, codec, 10, 7)
    add_steps(old, url, codec, 11)
    add_steps(old, url, codec, 6, 4)
    add_steps(NEW, url, codec, 8)
    for version in (old, NEW):
        assert "not ok" not in run(version, "ckpt-inspect", str(url), "--verify")


class Node:
    """A storage node of a version, on ports that stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._monitor = free_port(), free_port()

    def start(self, version: Path) -> None:
        """Start the node with this version, and wait until it serves."""
        command = [version / "ckpt-node", "--data", self.folder, "--listen", f"127.0.0.1:{self.port}"]
        self.folder.mkdir(exist_ok=True)
        with open(self.folder.with_suffix(".log"), "ab") as log:
            self._process = subprocess.Popen(
                [*command, "--monitor", f"127.0.0.1:{self._monitor}"], stdout=log, stderr=log, cwd=version
            )
        until(self._is_healthy, "the node serves")

    def stop(self) -> None:
        """End the node as an administrator does, and wait for its end."""
        self._process.terminate()
        assert self._process.wait(600) == 0

    def restart(self, version: Path) -> None:
        """End the node, and start it with another version."""
        self.stop()
        self.start(version)

    def kill(self) -> None:
        """End the node if it still runs."""
        self._process.kill()
        self._process.wait()

    def _is_healthy(self) -> bool:
        assert self._process.poll() is None, self.folder.with_suffix(".log").read_text()
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self._monitor}/healthz", timeout=60).status == 200
        except (urllib.error.URLError, ConnectionError):
            return False


@with_make_soak
def test_nodes_and_clients_of_two_versions_share_a_namespace(old: Path, tmp_path: Path) -> None:
    """The nodes are upgraded one after the other, two of them go back, and one loses its disk."""
    nodes = [Node(tmp_path / f"node-{number}") for number in range(3)]
    namespace = "ckpt://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    last = 1
    with ExitStack() as end:
        for node in nodes:
            node.start(old)
            end.callback(node.kill)
        add_steps(old, f"{namespace}/run", "none", last)
        for node, version in [*((node, NEW) for node in nodes), *((node, old) for node in nodes[1:])]:
            node.restart(version)
            for client in (old, NEW):
                last += 1
                add_steps(client, f"{namespace}/run", "auto", last)
            for client in (old, NEW):
                assert "all whole" in run(client, "ckpt-node", "admin", "scrub", namespace)
        nodes[1].stop()
        nodes[1].folder.rename(tmp_path / "lost")
        nodes[1].start(NEW)
        assert "all whole now" in run(NEW, "ckpt-node", "admin", "repair", namespace)
        for client in (old, NEW):
            assert "all whole" in run(client, "ckpt-node", "admin", "scrub", namespace)
            last += 1
            add_steps(client, f"{namespace}/run", "auto", last)


@pytest.fixture
def no_rank_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kill the ranks of a test that has failed."""
    monkeypatch.setenv(MARK, str(tmp_path))
    yield
    for pid in processes.find_processes([], f"{MARK}={tmp_path}"):
        os.kill(pid, signal.SIGKILL)


@with_make_soak
@pytest.mark.usefixtures("no_rank_is_left")
def test_versions_continue_a_run_in_turns(old: Path, tmp_path: Path) -> None:
    """Each ckpt-run is killed after some saves, and the other version continues; no step is lost or repeated."""
    url, count, seconds = tmp_path / "steps", 120, 0.05
    common = ["-n", "2", "--run-dir", str(tmp_path / "run"), "--dir", str(url), "--"]

    def newest() -> int:
        return ckpt.open(url).newest()[1] if (url / "ckpt.json").exists() else -1

    for version in (old, NEW, old, NEW):
        program = [str(version / "python"), PROGRAM, "train", str(count), str(seconds)]
        before = newest()
        with open(tmp_path / "log", "ab") as log:
            coordinator = subprocess.Popen([version / "ckpt-run", *common, *program], stdout=log, stderr=log, cwd=version)
        until(lambda until_step=before + 15: newest() >= until_step, "some steps are saved")
        coordinator.kill()
        coordinator.wait()
        until(lambda: not _ranks(tmp_path), "the ranks have ended")
    run(NEW, "ckpt-run", *common, str(NEW / "python"), PROGRAM, "train", str(count), str(seconds))
    for version in (old, NEW):
        run(version, "python", PROGRAM, "trained", str(url), str(count))
        assert run(version, "ckpt-run", "why", "--run-dir", str(tmp_path / "run")).count("attempt 4") >= 2


def _ranks(folder: Path) -> list[int]:
    return processes.find_processes([], f"{MARK}={folder}")
