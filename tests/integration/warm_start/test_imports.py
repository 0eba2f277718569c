"""Which modules the fork server imports, and which commands are started cold."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.fork_servers import Starter, have_ended, run_cold, run_warm, script, surroundings, write_packages
from helpers.fork_servers import start_fork_server as start_fork_server
from hypothesis import given
from hypothesis import strategies as st

from ckpt.recovery.ranks.fork_client import NotForkable, split_python_command
from ckpt.training import import_report
from ckpt.training.heartbeat_page import HeartbeatPage

if sys.platform != "linux":
    pytest.skip("needs Linux: a fork server gives its children to another process", allow_module_level=True)


BAD = {
    "threads": ("import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n",
                "without bad: it starts a thread when it is imported"),
    "processes": ("import subprocess\nchild = subprocess.Popen(['sleep', '3600'])\n",
                  "without bad: it starts a process when it is imported"),
    "ranks": ("import os\nrank = int(os.environ.get('LOCAL_RANK', 0))\n",
              "without bad: it looks at LOCAL_RANK when it is imported"),
    "signals": ("import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n",
                "without bad: it can't be imported alone (ValueError: signal only works in main thread"),
    "set first": ("import os\nbackend = os.getenv('BACKEND', 'default')\n",
                  "without bad: it looks at BACKEND when it is imported, which the script sets"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_module_that_cannot_be_imported_alone_is_left_out(start_fork_server: Starter, tmp_path: Path, kind: str) -> None:
    """Only it and the modules that need it are left out; the rank imports it by itself, unchanged."""
    bad, why = BAD[kind]
    site = write_packages(tmp_path, good="", bad=bad, needs="import bad\n")
    text = """
        import os, sys
        os.environ["BACKEND"] = "mine"
        before = sorted({"good", "bad", "needs"} & sys.modules.keys())
        import good, needs, bad
        from ckpt.training import import_report
        import_report.write_report()
        print(*before, getattr(bad, "rank", 1), getattr(bad, "backend", "mine"))
        if hasattr(bad, "child"): bad.child.kill()
    """
    command = [sys.executable, script(tmp_path / "here", text)]
    page, path = str(tmp_path / "page"), str(site)
    assert run_cold(command, tmp_path / "cold", CKPT_PULSE=page, PYTHONPATH=path) == 0
    fork_server = start_fork_server(command, import_report.report_path(page), PYTHONPATH=path)
    assert fork_server.is_ready, fork_server.reason
    assert why in fork_server.note
    assert "without needs: it needs bad, which is left out" in fork_server.note
    assert run_warm(fork_server, tmp_path / "warm", 1, PYTHONPATH=path) == 0, (tmp_path / "warm").read_text()
    assert (tmp_path / "warm").read_text() == "good 1 mine\n"


def test_a_module_that_starts_mpi_is_left_out(start_fork_server: Starter, tmp_path: Path) -> None:
    names = {"needs": "import mpi4py.MPI\n", "good": "", "mpi4py": "raise RuntimeError('begun')\n"}
    site = write_packages(tmp_path, **names)
    reported = {"modules": {name: str(site / name / "__init__.py") for name in names}, "environ": {}}
    path = script(tmp_path / "here", f"import sys\nprint(*sorted({set(names)} & sys.modules.keys()))\n")
    fork_server = start_fork_server([sys.executable, path], reported, PYTHONPATH=str(site))
    assert (fork_server.is_ready, fork_server.note) == (True, "without needs: it needs mpi4py, which is left out"), (
        fork_server.reason
    )
    assert run_warm(fork_server, tmp_path / "log", PYTHONPATH=str(site)) == 0
    assert (tmp_path / "log").read_text() == "good\n"


def test_a_fork_server_gives_up_when_too_many_modules_are_left_out(start_fork_server: Starter, tmp_path: Path) -> None:
    """It does not restart forever."""
    names = {f"bad{n}": "raise RuntimeError('not today')\n" for n in range(20)}
    site = write_packages(tmp_path, **names)
    reported = {"modules": {name: str(site / name / "__init__.py") for name in names}, "environ": {}}
    fork_server = start_fork_server([sys.executable, script(tmp_path / "here", "")], reported, PYTHONPATH=str(site))
    assert not fork_server.is_ready
    assert "can't be imported alone (RuntimeError: not today); and 8 other packages" in fork_server.reason
    assert have_ended(fork_server.pid)


def test_modules_that_the_user_may_edit_are_not_pre_imported(start_fork_server: Starter, tmp_path: Path) -> None:
    """These are modules beside the script, modules in the search path, and a library of such a name."""
    site = write_packages(tmp_path, good="", statistics="raise RuntimeError('the wrong one')\n")
    text = """
        import os, sys
        from ckpt.training import import_report
        print(*sorted({"good", "model", "other", "statistics", "space"} & sys.modules.keys()))
        import good, model, other, statistics, space.deep
        import_report.write_report()
        print(model.pid == os.getpid(), statistics.__file__.endswith("here/statistics.py"))
    """
    command = [sys.executable, script(tmp_path / "here", text)]
    script(tmp_path / "here", "import os\npid = os.getpid()\n", "model.py")
    script(tmp_path / "here", "", "statistics.py")
    script(tmp_path / "there", "", "other.py")
    (tmp_path / "here" / "space").mkdir()
    (tmp_path / "here" / "space" / "deep.py").write_text("")
    page, path = str(tmp_path / "page"), f"{tmp_path / 'there'}:{site}"
    assert run_cold(command, tmp_path / "cold", CKPT_PULSE=page, PYTHONPATH=path) == 0, (tmp_path / "cold").read_text()
    fork_server = start_fork_server(command, import_report.report_path(page), PYTHONPATH=path)
    assert (fork_server.is_ready, fork_server.note) == (True, ""), fork_server.reason
    assert run_warm(fork_server, tmp_path / "warm", PYTHONPATH=path) == 0, (tmp_path / "warm").read_text()
    assert (tmp_path / "warm").read_text() == "good\nTrue True\n"


def test_a_rank_reports_its_imports(tmp_path: Path) -> None:
    """One rank of each host reports at the first step, with late imports, and when a save is done."""
    text = """
        import os, shutil, sys
        import ckpt
        from ckpt.training import import_report
        page = os.environ["CKPT_PULSE"]
        os.environ["MINE"] = "1"
        with ckpt.Checkpointer(sys.argv[1], every=3, group=None) as ck:
            for step in range(7):
                if step == 0: import colorsys
                if step == 1: import wave
                if step == 6: import mailbox
                ck.step(step, {})
                ck.wait()
                if step in (1, 3) and os.environ["RANK"] == "0":
                    shutil.copy(import_report.report_path(page), f"{page}.{step}")
    """
    command = [sys.executable, script(tmp_path, text)]
    for rank in range(2):
        page, log = tmp_path / f"page-{rank}", tmp_path / "log"
        HeartbeatPage(page, new=True)
        assert run_cold([*command, str(tmp_path / f"repo-{rank}")], log, rank, CKPT_PULSE=str(page)) == 0, log.read_text()
    first, second, last = (
        json.loads(path.read_text())
        for path in (tmp_path / "page-0.1", tmp_path / "page-0.3", import_report.report_path(tmp_path / "page-0"))
    )
    assert first["modules"]["__main__"] == command[1]
    assert first["environ"] == {"MINE": "1"}
    assert "colorsys" in first["modules"]
    assert "wave" not in first["modules"]
    assert "wave" in second["modules"]
    assert "pyarrow.parquet" in second["modules"]
    assert "mailbox" not in last["modules"]
    assert not import_report.report_path(tmp_path / "page-1").exists()


def test_a_python_command_is_split_into_flags_script_and_arguments(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    for words, flags, rest in [
        ([path], [], [path]),
        (["-u", path, "-m", "x"], ["-u"], [path, "-m", "x"]),
        (["-X", "dev", "-Wignore", "-W", "error", path], ["-X", "dev", "-Wignore", "-W", "error"], [path]),
        (["-m", "pack.age", "-u"], [], ["-m", "pack.age", "-u"]),
        (["-uBmpack", "a"], ["-uB"], ["-m", "pack", "a"]),
    ]:
        for python in ("python", "python3", "/opt/bin/python3.13t"):
            assert split_python_command([python, *words]) == ([python, *flags], rest)


@given(
    flags=st.lists(st.sampled_from(["-u", "-B", "-OO", "-sE", "-W ignore", "-Werror", "-X dev", "-bb", "-P"]), max_size=4),
    rest=st.lists(st.text(max_size=5), max_size=4), as_module=st.booleans(),
)  # fmt: skip
def test_no_word_of_a_command_is_lost(flags: list[str], rest: list[str], as_module: bool) -> None:
    words = [word for flag in flags for word in flag.split()]
    script = ["-m", "some.module", *rest] if as_module else [__file__, *rest]
    assert split_python_command(["python3", *words, *script]) == (["python3", *words], script)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["bash", "run.sh"], "bash is not python"),
        (["pythonic", "x.py"], "pythonic is not python"),
        (["python"], "python is given no script"),
        (["python", "-m"], "runs no script"),
        (["python", "-W"], "python is given no script"),
        (["python", "-c", "pass"], "python -c runs no script"),
        (["python", "-ui", "x.py"], "python -ui runs no script"),
        (["python", "--version"], "python --version runs no script"),
        (["python", "-"], "standard input"),
        (["python", "none.py"], "there is no none.py here"),
        (["python", "."], ". is not a file of Python source"),
        (["/none/such/python", __file__], "/none/such/python can't be started: No such file or directory"),
    ],
)
def test_a_command_that_cannot_be_forked_is_started_cold(
    start_fork_server: Starter, tmp_path: Path, command: list[str], why: str
) -> None:
    fork_server = start_fork_server(command)
    assert not fork_server.is_ready
    assert why in fork_server.reason
    assert fork_server.fork(surroundings(), tmp_path / "log") is None
    assert not (tmp_path / "log").exists()
    if command[0] != "/none/such/python":
        with pytest.raises(NotForkable):
            split_python_command(command)


def test_a_program_that_is_no_python_is_started_cold(start_fork_server: Starter, tmp_path: Path) -> None:
    liar = tmp_path / "python3"
    liar.write_text("#!/bin/sh\necho no licence >&2; exit 3\n")
    liar.chmod(0o755)
    fork_server = start_fork_server([str(liar), script(tmp_path, "")])
    assert not fork_server.is_ready
    assert "the process has ended (no licence)" in fork_server.reason


@pytest.mark.parametrize("what", ["script", "library", "deleted"])
def test_a_changed_script_or_library_is_not_run_warm(start_fork_server: Starter, tmp_path: Path, what: str) -> None:
    """The script, which may import other modules now, or a pre-imported library has changed: the fork server starts again."""
    site = write_packages(tmp_path, good="")
    path = script(
        tmp_path / "here", "import good\nfrom ckpt.training import import_report\nimport_report.write_report()\nprint('old')\n"
    )
    command, page = [sys.executable, path], str(tmp_path / "page")
    assert run_cold(command, tmp_path / "cold", CKPT_PULSE=page, PYTHONPATH=str(site)) == 0
    fork_server = start_fork_server(command, import_report.report_path(page), PYTHONPATH=str(site))
    assert run_warm(fork_server, tmp_path / "warm", PYTHONPATH=str(site)) == 0
    changed = Path(path) if what == "script" else site / "good" / "__init__.py"
    if what == "deleted":
        changed.unlink()
    else:
        changed.write_text("print('new')\n")
    assert fork_server.fork(surroundings(PYTHONPATH=str(site)), tmp_path / "again") is None
    assert fork_server.reason == f"{changed} has changed"
    assert have_ended(fork_server.pid)
    assert (tmp_path / "again").read_text() == ""


def test_a_script_that_sets_a_variable_of_native_code_is_started_cold(start_fork_server: Starter, tmp_path: Path) -> None:
    reported = {"modules": {}, "environ": {"OMP_NUM_THREADS": "3"}}
    fork_server = start_fork_server([sys.executable, script(tmp_path, "")], reported)
    assert not fork_server.is_ready
    assert fork_server.reason == "the script sets OMP_NUM_THREADS, and libraries have read it when they are loaded"


def test_a_changed_environment_is_started_cold(start_fork_server: Starter, tmp_path: Path) -> None:
    fork_server = start_fork_server([sys.executable, script(tmp_path, "")])
    assert fork_server.fork(surroundings(OMP_NUM_THREADS="2", NEW="1"), tmp_path / "log") is None
    assert fork_server.reason == "the environment has changed: NEW, OMP_NUM_THREADS"
