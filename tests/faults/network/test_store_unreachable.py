"""A rank that can't reach the store does not keep the others waiting: they learn its error without the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.folders import PROGRAMS
from helpers.rendezvous import env_groups, no_launcher, run_in_threads

from ckpt.groups import host_notes
from ckpt.recovery.ranks.launch import free_port
from ckpt.storage.base.failpoints import set_failpoints
from ckpt.storage.local.directory import LocalStore

__all__ = ["no_launcher"]

PROGRAM = PROGRAMS / "rank_without_store.py"
MPIEXEC = Path(sys.executable).parent / "mpiexec"
SECONDS = 400
"""Far below the timeout of a save, 600 s."""


def run_ranks(kind: str, folder: Path, bad: int, *more: str) -> dict[int, dict[str, str]]:
    """Run a save of two ranks of which `bad` fails, and return what each rank reported."""
    command = [sys.executable, str(PROGRAM), kind, str(folder), str(bad), *more]
    port = str(free_port("127.0.0.1"))
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if kind == "mpi":
        launched = [subprocess.Popen([MPIEXEC, "-n", "2", *command])]
    else:
        launched = [subprocess.Popen(command, env=env | {"RANK": str(rank)}) for rank in range(2)]
    try:
        for process in launched:
            process.wait(SECONDS)
    finally:
        for process in launched:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    return {rank: json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)}


def kinds() -> list[object]:
    """Return one parameter set for each kind of group that is installed."""
    needs_torch = pytest.mark.skipif(not _is_installed("torch"), reason="needs torch")
    needs_mpi = pytest.mark.skipif(not _is_installed("mpi4py") or not MPIEXEC.exists(), reason="needs mpi4py and mpiexec")
    return [
        pytest.param("torch", ["network"], marks=needs_torch, id="torch-network"),
        pytest.param(
            "jax", ["network"], marks=pytest.mark.skipif(not _is_installed("jax"), reason="needs jax"), id="jax-network"
        ),
        pytest.param("mpi", ["network"], marks=needs_mpi, id="mpi-network"),
        pytest.param("env", [], id="shared-memory"),
    ]


def _is_installed(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(("kind", "more"), kinds())
def test_the_other_rank_ends_with_the_reason_the_url_and_the_rank(tmp_path: Path, kind: str, more: list[str], bad: int) -> None:
    reports = run_ranks(kind, tmp_path, bad, *more)
    assert "injected at fail point" in reports[bad]["text"]
    other = reports[1 - bad]
    assert other["kind"] == "StepRefused"
    for part in (f"rank {bad} failed", "step 1 ", "injected at fail point", (tmp_path / "repo").as_uri()):
        assert part in other["text"]


def test_all_ranks_report_that_one_cannot_join_at_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks know of each other by the environment only."""
    groups = env_groups(2, monkeypatch, timeout=600.0, run_id=f"unreachable {tmp_path}")
    store_folder = tmp_path / "away"
    store_folder.mkdir()
    store = LocalStore(store_folder)
    failing = LocalStore(store_folder)
    monkeypatch.setattr(failing, "put", _unreachable_put(store))
    first = run_in_threads(lambda: groups[0].meet_at(store), lambda: groups[1].meet_at(failing))
    assert "rank 1 cannot join the other ranks" in str(first[0])
    for error in first:
        assert "no way to the store" in str(error)
        assert store_folder.as_uri() in str(error)
    assert run_in_threads(*(lambda group=group: group.meet_at(store) for group in groups)) == [None, None], (
        "the note of the first failure was read twice"
    )


def _unreachable_put(store: LocalStore):  # type: ignore[no-untyped-def]
    from ckpt.storage.base.errors import Unavailable

    def put(name: str, data: bytes) -> None:
        raise Unavailable(f"{store.url}/{name}: no way to the store")

    return put


def test_host_notes_expire_and_are_not_read_from_a_foreign_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_notes, "_BASE", tmp_path)
    host_notes.write("a", b"said")
    assert host_notes.read("a") == b"said"
    assert host_notes.read("b") is None
    folder = host_notes._folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    os.utime(folder / host_notes._name("a"), (0, 0))
    host_notes.write("b", b"now")
    assert host_notes.read("a") is None, "a note is read long after any rank waits for it"
    other = tmp_path / "other"
    folder.rename(other)
    folder.symlink_to(other)
    assert host_notes.read("b") is None


def test_a_note_read_from_a_stopped_network_returns_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that serves the notes is stopped: a read returns soon, and only one such call is made at a time."""
    import threading

    from ckpt.groups import base
    from ckpt.groups.base import SingleProcessGroup

    monkeypatch.setattr(base, "_NOTE_SECONDS", 0.05)
    resume, calls = threading.Event(), []

    class Slow(SingleProcessGroup):
        has_network_notes = True

        def _network_note(self, key: str) -> bytes | None:
            calls.append(key)
            resume.wait(600)
            return key.encode()

    group = Slow()
    assert group.note("a") is None
    assert group.note("b") is None
    assert calls == ["a"]
    resume.set()
    assert group._note_thread is not None
    group._note_thread.join()
    assert group.note("c") == b"c"
    set_failpoints("")
