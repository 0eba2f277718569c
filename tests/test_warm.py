"""Warm starts: a rank that was forked is as one that was started, and whatever can't be forked is said, and started cold."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.recovery.ranks import processes
from ckpt.recovery.ranks.fork_client import ForkedRank, ForkServerClient, ForkServers, NotForkable, split_python_command
from ckpt.training import import_report
from ckpt.training.heartbeat_page import HeartbeatPage

if sys.platform != "linux":
    pytest.skip("needs Linux: a forge hands its children to another process", allow_module_level=True)

PROGRAM = Path(__file__).parent / "warm_program.py"

Starter = Callable[..., ForkServerClient]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Starter]:
    made: list[ForkServerClient] = []

    def one(command: Sequence[str], told: dict[str, object] | Path | None = None, **environ: str) -> ForkServerClient:
        """A forge that is ready, or has a reason. told: modules by name, as a rank would tell."""
        if not isinstance(told, Path):
            file = tmp_path / "told.imports"
            file.write_text(json.dumps(told or {"modules": {}, "environ": {}}))
            told = file
        forge = ForkServerClient.start(command, surroundings(**environ), told)
        made.append(forge)
        until = time.monotonic() + 120
        while not forge.is_ready and not forge.reason and time.monotonic() < until:
            time.sleep(0.01)
        return forge

    yield one
    for forge in made:
        forge.close()
    processes._prctl(processes._SET_CHILD_SUBREAPER, 0)


def surroundings(rank: int = 0, **more: str) -> dict[str, str]:
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **told, **more}


def modules(*names: str) -> dict[str, object]:
    origins = {name: spec.origin for name in names if (spec := importlib.util.find_spec(name))}
    return {"modules": origins, "environ": {}}


def script(folder: Path, text: str, name: str = "train.py") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(textwrap.dedent(text))
    return str(folder / name)


def cold(command: Sequence[str], log: Path, rank: int = 0, **environ: str) -> int:
    """As ckpt-run starts a rank today."""
    with log.open("ab") as out:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=surroundings(rank, **environ),
            start_new_session=True, check=False,
        ).returncode  # fmt: skip


def warm(forge: ForkServerClient, log: Path, rank: int = 0, **environ: str) -> int:
    forged = forge.fork(surroundings(rank, **environ), log)
    assert forged is not None, forge.reason
    return forged.wait()


def gone(*pids: int | None) -> bool:
    until = time.monotonic() + 20
    while any(processes.process_state(pid) not in ("", "Z") for pid in pids if pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


# --- as if it had been started ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [str(PROGRAM), "--lr", "1e-4", ""],
        ["-u", "-W", "ignore", "-Xutf8", "./../tests/warm_program.py"],
        ["-P", "warm_program.py", "-m"],
        ["-u", "-m", "warm_program", "a"],
        ["-bbIOO", "warm_program.py"],
    ],
)
def test_all_is_as_in_a_process_that_was_started(
    begin: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(PROGRAM.parent)
    command, page = [sys.executable, *words], str(tmp_path / "page")
    log = tmp_path / "log"
    assert cold(command, log, CKPT_PULSE=page) == 0, log.read_text()
    want = json.loads(log.read_text())
    forge = begin(command, import_report.report_path(page))
    assert forge.is_ready, forge.reason
    assert forge.note == ""
    for _ in range(2):  # as often as it is asked to
        log.unlink()
        assert warm(forge, log, CKPT_PULSE=page) == 0, log.read_text()
        assert json.loads(log.read_text()) == want


ENDS = """
    import atexit, os, random, signal, sys, threading, time

    class Mine(Exception):
        pass

    def deep():
        raise Mine("deep")

    atexit.register(print, "at exit")
    print("begun", end=" ")
    print("said", file=sys.stderr)
    end = int(os.environ["RANK"])
    if end == 1: sys.exit(3)
    if end == 2: sys.exit("a text")
    if end == 3: deep()
    if end == 4: raise KeyboardInterrupt
    if end == 5: os._exit(5)
    if end == 6: os.kill(os.getpid(), signal.SIGKILL)
    if end == 7: os.kill(os.getpid(), signal.SIGTERM)
    if end == 8: threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
    if end == 9: compile("x = = 1", "other.py", "exec")
    if end == 10:
        sys.excepthook = lambda kind, error, trace: print("hook", kind, trace.tb_frame.f_code.co_name, trace.tb_lineno)
        deep()
    if end == 11:
        try: deep()
        except Mine as error: raise ValueError("chained") from error
    if end == 12: os.close(1)
    if end == 13: signal.raise_signal(signal.SIGINT)
    if end == 14: exec("raise SystemExit")
    if end == 15: raise BaseExceptionGroup("many", [Mine("one"), KeyboardInterrupt()])
"""


def test_it_ends_as_it_would_have_ended(begin: Starter, tmp_path: Path) -> None:
    """Exit status and output, to the last byte."""
    command = [sys.executable, script(tmp_path, ENDS)]
    forge = begin(command)
    for end in range(16):
        started, forked = tmp_path / f"cold-{end}", tmp_path / f"warm-{end}"
        want = cold(command, started, end)
        assert warm(forge, forked, end) == want, end
        assert forked.read_text() == started.read_text(), end
    assert (tmp_path / "warm-3").read_text().count("File ") == 2


@pytest.mark.parametrize("text", ["x = = 1\n", "\ufeffprint('bom')\n", "# coding: latin-1\nprint('é')\n", "", "raise\n"])
@pytest.mark.parametrize("as_module", [False, True])
def test_what_a_script_may_be(
    begin: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, as_module: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    coding = "latin-1" if "latin" in text else "utf-8"
    Path("train.py").write_text(text, encoding=coding)
    command = [sys.executable, *(["-m", "train"] if as_module else ["train.py"])]
    want = cold(command, tmp_path / "cold")
    assert warm(begin(command), tmp_path / "warm") == want
    assert (tmp_path / "warm").read_text() == (tmp_path / "cold").read_text()


def test_processes_of_its_own(begin: Starter, tmp_path: Path) -> None:
    """Spawned, forked and served by a server: each finds the script and its classes."""
    text = """
        import multiprocessing, os, pickle, sys
        from concurrent.futures import ProcessPoolExecutor

        class Point:
            def __init__(self, x): self.x = x

        def double(point): return Point(2 * point.x)

        if __name__ == "__main__":
            print(pickle.loads(pickle.dumps(Point(3))).x, Point.__module__)
            for way in ("spawn", "fork", "forkserver"):
                with ProcessPoolExecutor(1, multiprocessing.get_context(way)) as pool:
                    print(way, pool.submit(double, Point(4)).result().x, os.environ["RANK"])
    """
    command = [sys.executable, script(tmp_path, text)]
    forge = begin(command, modules("multiprocessing", "concurrent.futures", "concurrent.futures.process", "pickle"))
    assert forge.is_ready, forge.reason
    assert warm(forge, tmp_path / "log", 7) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text() == "3 __main__\nspawn 8 7\nfork 8 7\nforkserver 8 7\n"


def test_torch(begin: Starter, tmp_path: Path) -> None:
    """Two ranks that speak by gloo, with workers that load, and numbers of their own; torch was there before the script."""
    text = """
        import sys
        there = "torch" in sys.modules and "numpy" in sys.modules
        import os, random
        import numpy as np, torch, torch.distributed as dist
        from torch.utils.data import DataLoader

        class Data(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): return torch.tensor(index)

        if __name__ == "__main__":
            drawn = [random.getrandbits(60), int(np.random.randint(1 << 60)), int(torch.randint(1 << 60, ()))]
            dist.init_process_group("gloo")
            total = torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(total)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
            model(torch.ones(2, 4)).sum().backward()
            loaded = sum(int(batch.sum()) for batch in DataLoader(Data(), batch_size=2, num_workers=2))
            dist.barrier()
            print(there, total.item(), loaded, *drawn)
            dist.destroy_process_group()
    """
    command = [sys.executable, script(tmp_path, text)]
    forge = begin(command, modules("numpy", "torch", "torch.distributed", "torch.utils.data"))
    assert forge.is_ready, forge.reason
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [forge.fork(surroundings(rank, **at), tmp_path / f"log-{rank}") for rank in range(2)]
    assert [rank.wait() for rank in ranks if rank] == [0, 0], (tmp_path / "log-0").read_text()
    said = [(tmp_path / f"log-{rank}").read_text().split()[-6:] for rank in range(2)]
    assert [each[:3] for each in said] == [["True", "3.0", "28"]] * 2
    assert all(mine != theirs for mine, theirs in zip(said[0][3:], said[1][3:], strict=True))


def test_it_is_the_rank(begin: Starter, tmp_path: Path) -> None:
    """A forked child of a rank is not the rank; one that the forge has forked is."""
    text = """
        import os
        from ckpt.training import heartbeat_page as pulse
        pulse.own_page().beat(2, 41)
        if os.fork() == 0:
            os._exit(0 if pulse.own_page() is None else 1)
        assert os.wait()[1] == 0
    """
    page = HeartbeatPage(tmp_path / "page", new=True)
    forge = begin([sys.executable, script(tmp_path, text)], modules("ckpt", "ckpt.training.heartbeat_page"))
    rank = forge.fork(surroundings(CKPT_PULSE=str(tmp_path / "page")), tmp_path / "log")
    assert rank is not None
    assert rank.wait() == 0, (tmp_path / "log").read_text()
    assert (page.read().pid, page.read().step) == (rank.pid, 41)


def test_numbers_in_many_threads(begin: Starter, tmp_path: Path) -> None:
    """OpenBLAS starts threads when numpy is imported, and knows of forks."""
    text = "import numpy as np\nprint(float((np.ones((900, 900)) @ np.ones((900, 900))).sum()))\n"
    forge = begin([sys.executable, script(tmp_path, text)], modules("numpy"), OMP_NUM_THREADS="4")
    assert (forge.is_ready, forge.note) == (True, ""), forge.reason
    for _ in range(2):
        (tmp_path / "log").unlink(missing_ok=True)
        assert warm(forge, tmp_path / "log", OMP_NUM_THREADS="4") == 0
        assert (tmp_path / "log").read_text() == "729000000.0\n"


def test_an_allocator_with_a_thread(begin: Starter, tmp_path: Path) -> None:
    """That of pyarrow, which ckpt itself needs."""
    text = """
        import sys
        there = "pyarrow.parquet" in sys.modules
        import pyarrow as pa, pyarrow.parquet as pq
        table = pa.table({"x": range(100_000)})
        pq.write_table(table, sys.argv[1])
        print(there, pq.read_table(sys.argv[1]).equals(table))
    """
    command = [sys.executable, script(tmp_path, text), str(tmp_path / "table")]
    forge = begin(command, modules("pyarrow", "pyarrow.parquet"))
    assert (forge.is_ready, forge.note) == (True, ""), forge.reason
    for _ in range(2):
        assert warm(forge, tmp_path / "log") == 0
    assert (tmp_path / "log").read_text() == "True True\n" * 2


# --- what is imported ahead ------------------------------------------------------------------------------------


def libraries(folder: Path, **texts: str) -> Path:
    site = folder / "site-packages"
    site.mkdir()
    for name, text in texts.items():
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(textwrap.dedent(text))
    return site


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
def test_what_is_left_out(begin: Starter, tmp_path: Path, kind: str) -> None:
    """Alone, with those that need it; the rank imports it by itself, and finds it as it is."""
    bad, why = BAD[kind]
    site = libraries(tmp_path, good="", bad=bad, needs="import bad\n")
    text = """
        import os, sys
        os.environ["BACKEND"] = "mine"
        before = sorted({"good", "bad", "needs"} & sys.modules.keys())
        import good, needs, bad
        from ckpt.training import import_report as imports
        imports.write_report()
        print(*before, getattr(bad, "rank", 1), getattr(bad, "backend", "mine"))
        if hasattr(bad, "child"): bad.child.kill()
    """
    command = [sys.executable, script(tmp_path / "here", text)]
    page, path = str(tmp_path / "page"), str(site)
    assert cold(command, tmp_path / "cold", CKPT_PULSE=page, PYTHONPATH=path) == 0
    forge = begin(command, import_report.report_path(page), PYTHONPATH=path)
    assert forge.is_ready, forge.reason
    assert why in forge.note
    assert "without needs: it needs bad, which is left out" in forge.note
    assert warm(forge, tmp_path / "warm", 1, PYTHONPATH=path) == 0, (tmp_path / "warm").read_text()
    assert (tmp_path / "warm").read_text() == "good 1 mine\n"


def test_what_begins_mpi_is_left_out(begin: Starter, tmp_path: Path) -> None:
    names = {"needs": "import mpi4py.MPI\n", "good": "", "mpi4py": "raise RuntimeError('begun')\n"}
    site = libraries(tmp_path, **names)
    told = {"modules": {name: str(site / name / "__init__.py") for name in names}, "environ": {}}
    path = script(tmp_path / "here", f"import sys\nprint(*sorted({set(names)} & sys.modules.keys()))\n")
    forge = begin([sys.executable, path], told, PYTHONPATH=str(site))
    assert (forge.is_ready, forge.note) == (True, "without needs: it needs mpi4py, which is left out"), forge.reason
    assert warm(forge, tmp_path / "log", PYTHONPATH=str(site)) == 0
    assert (tmp_path / "log").read_text() == "good\n"


def test_too_much_is_left_out(begin: Starter, tmp_path: Path) -> None:
    """It does not begin anew for ever."""
    names = {f"bad{n}": "raise RuntimeError('not today')\n" for n in range(20)}
    site = libraries(tmp_path, **names)
    told = {"modules": {name: str(site / name / "__init__.py") for name in names}, "environ": {}}
    forge = begin([sys.executable, script(tmp_path / "here", "")], told, PYTHONPATH=str(site))
    assert not forge.is_ready
    assert "can't be imported alone (RuntimeError: not today); and as many as 8 other packages" in forge.reason
    assert gone(forge.pid)


def test_what_the_user_may_edit_is_not_imported_ahead(begin: Starter, tmp_path: Path) -> None:
    """Neither what lies beside the script, nor what the search path names, nor a library of that name."""
    site = libraries(tmp_path, good="", statistics="raise RuntimeError('the wrong one')\n")
    text = """
        import os, sys
        from ckpt.training import import_report as imports
        print(*sorted({"good", "model", "other", "statistics", "space"} & sys.modules.keys()))
        import good, model, other, statistics, space.deep
        imports.write_report()
        print(model.pid == os.getpid(), statistics.__file__.endswith("here/statistics.py"))
    """
    command = [sys.executable, script(tmp_path / "here", text)]
    script(tmp_path / "here", "import os\npid = os.getpid()\n", "model.py")
    script(tmp_path / "here", "", "statistics.py")
    script(tmp_path / "there", "", "other.py")
    (tmp_path / "here" / "space").mkdir()
    (tmp_path / "here" / "space" / "deep.py").write_text("")
    page, path = str(tmp_path / "page"), f"{tmp_path / 'there'}:{site}"
    assert cold(command, tmp_path / "cold", CKPT_PULSE=page, PYTHONPATH=path) == 0, (tmp_path / "cold").read_text()
    forge = begin(command, import_report.report_path(page), PYTHONPATH=path)
    assert (forge.is_ready, forge.note) == (True, ""), forge.reason
    assert warm(forge, tmp_path / "warm", PYTHONPATH=path) == 0, (tmp_path / "warm").read_text()
    assert (tmp_path / "warm").read_text() == "good\nTrue True\n"


def test_what_libraries_set_stays_set(begin: Starter, tmp_path: Path) -> None:
    """A variable that an import sets is there for the rank, and one that the script sets wins."""
    site = libraries(tmp_path, sets="import os\nos.environ.setdefault('A_CACHE', '/a')\nos.environ['KMP_INIT'] = '1'\n")
    text = """
        import os
        import sets
        from ckpt.training import import_report as imports
        imports.write_report()
        print(os.environ["A_CACHE"], os.environ["KMP_INIT"], os.environ["RANK"])
    """
    command = [sys.executable, script(tmp_path / "here", text)]
    page, path = str(tmp_path / "page"), str(site)
    assert cold(command, tmp_path / "cold", CKPT_PULSE=page, PYTHONPATH=path) == 0
    forge = begin(command, import_report.report_path(page), PYTHONPATH=path)
    assert (forge.is_ready, forge.note) == (True, ""), forge.reason
    for rank in range(2):
        assert warm(forge, tmp_path / "warm", rank, PYTHONPATH=path) == 0
    assert (tmp_path / "warm").read_text() == "/a 1 0\n/a 1 1\n"


def test_a_rank_tells_what_it_has_imported(tmp_path: Path) -> None:
    """At the first step, late imports and all, and when a save is done; only one of a host does."""
    text = """
        import os, shutil, sys
        import ckpt
        from ckpt.training import import_report as imports
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
                    shutil.copy(imports.report_path(page), f"{page}.{step}")
    """
    command = [sys.executable, script(tmp_path, text)]
    for rank in range(2):
        page, log = tmp_path / f"page-{rank}", tmp_path / "log"
        HeartbeatPage(page, new=True)
        assert cold([*command, str(tmp_path / f"repo-{rank}")], log, rank, CKPT_PULSE=str(page)) == 0, log.read_text()
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


# --- cold, and why ---------------------------------------------------------------------------------------------


def test_commands_taken_apart(tmp_path: Path) -> None:
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
def test_nothing_of_a_command_is_lost(flags: list[str], rest: list[str], as_module: bool) -> None:
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
        (["python", "."], ". is no file of Python source"),
        (["/none/such/python", __file__], "/none/such/python can't be started: No such file or directory"),
    ],
)
def test_what_is_started_cold(begin: Starter, tmp_path: Path, command: list[str], why: str) -> None:
    forge = begin(command)
    assert not forge.is_ready
    assert why in forge.reason
    assert forge.fork(surroundings(), tmp_path / "log") is None
    assert not (tmp_path / "log").exists()
    if command[0] != "/none/such/python":
        with pytest.raises(NotForkable):
            split_python_command(command)


def test_no_python_after_all(begin: Starter, tmp_path: Path) -> None:
    liar = tmp_path / "python3"
    liar.write_text("#!/bin/sh\necho no licence >&2; exit 3\n")
    liar.chmod(0o755)
    forge = begin([str(liar), script(tmp_path, "")])
    assert not forge.is_ready
    assert "the process has ended (no licence)" in forge.reason


@pytest.mark.parametrize("what", ["script", "library", "gone"])
def test_what_has_changed_is_not_run_warm(begin: Starter, tmp_path: Path, what: str) -> None:
    """A newer version of what was imported ahead, or a script that may go another way, starts anew."""
    site = libraries(tmp_path, good="")
    path = script(
        tmp_path / "here", "import good\nfrom ckpt.training import import_report\nimport_report.write_report()\nprint('old')\n"
    )
    command, page = [sys.executable, path], str(tmp_path / "page")
    assert cold(command, tmp_path / "cold", CKPT_PULSE=page, PYTHONPATH=str(site)) == 0
    forge = begin(command, import_report.report_path(page), PYTHONPATH=str(site))
    assert warm(forge, tmp_path / "warm", PYTHONPATH=str(site)) == 0
    changed = Path(path) if what == "script" else site / "good" / "__init__.py"
    if what == "gone":
        changed.unlink()
    else:
        changed.write_text("print('new')\n")
    assert forge.fork(surroundings(PYTHONPATH=str(site)), tmp_path / "again") is None
    assert forge.reason == f"{changed} has changed"
    assert gone(forge.pid)
    assert (tmp_path / "again").read_text() == ""


def test_native_code_has_read_what_the_script_sets(begin: Starter, tmp_path: Path) -> None:
    told = {"modules": {}, "environ": {"OMP_NUM_THREADS": "3"}}
    forge = begin([sys.executable, script(tmp_path, "")], told)
    assert not forge.is_ready
    assert forge.reason == "the script sets OMP_NUM_THREADS, and libraries have read it when they are loaded"


def test_another_environment(begin: Starter, tmp_path: Path) -> None:
    forge = begin([sys.executable, script(tmp_path, "")])
    assert forge.fork(surroundings(OMP_NUM_THREADS="2", NEW="1"), tmp_path / "log") is None
    assert forge.reason == "the environment has changed: NEW, OMP_NUM_THREADS"


# --- for the life of a run -------------------------------------------------------------------------------------


def test_a_run_becomes_warm(begin: Starter, tmp_path: Path) -> None:
    """Once a rank tells; better when it tells more; cold and then warm again when the script is another."""
    text = "import sys\nprint(*sorted({'wave', 'colorsys'} & sys.modules.keys()))\n"
    command, told, log = [sys.executable, script(tmp_path, text)], tmp_path / "told", tmp_path / "log"
    warm_starts = ForkServers(command)

    def tell(*names: str) -> None:
        found = modules(*names)
        found["modules"]["__main__"] = command[1]  # type: ignore[index]
        told.write_text(json.dumps(found))

    def until_warm() -> None:
        until = time.monotonic() + 60
        while warm_starts._next or warm_starts.status_text != "the next start is warm":
            assert time.monotonic() < until, warm_starts.status_text
            warm_starts.update(surroundings(), told)
            time.sleep(0.01)

    def start() -> str | None:
        log.unlink(missing_ok=True)
        rank = warm_starts.fork(surroundings(1), log)
        return None if rank is None else log.read_text() if rank.wait() == 0 else "failed"

    try:
        warm_starts.update(surroundings(), told)
        assert warm_starts.status_text == "no warm start yet: no rank has done a step"
        assert start() is None
        tell("colorsys")
        warm_starts.update(surroundings(), told)
        until_warm()
        assert start() == "colorsys\n"
        tell("colorsys", "wave")
        warm_starts.update(surroundings(), told)
        assert start() == "colorsys\n", "the old one serves until the new one is ready"
        until_warm()
        assert start() == "colorsys wave\n"
        tell("wave")
        warm_starts.update(surroundings(), told)
        assert warm_starts._next is None, "nothing new"
        Path(command[1]).write_text("print('new')\n")
        assert start() is None
        assert warm_starts.status_text == f"no warm start: {command[1]} has changed"
        warm_starts.update(surroundings(), told)
        assert start() is None, "only what is told after the change is believed"
        tell("wave")
        warm_starts.update(surroundings(), told)
        until_warm()
        assert start() == "new\n"
    finally:
        warm_starts.close()


# --- faults ----------------------------------------------------------------------------------------------------


SLEEPS = "import time\nprint('here', flush=True)\ntime.sleep(3600)\n"


def says(log: Path, text: str) -> bool:
    until = time.monotonic() + 60
    while text not in (log.read_text() if log.exists() else ""):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_signals_and_statuses(begin: Starter, tmp_path: Path) -> None:
    forge = begin([sys.executable, script(tmp_path, SLEEPS)])
    ranks = [forge.fork(surroundings(n), tmp_path / f"log-{n}") for n in range(2)]
    assert all(says(tmp_path / f"log-{n}", "here") for n in range(2))
    first, second = [rank for rank in ranks if rank]
    assert (first.poll(), second.poll()) == (None, None)
    assert os.getsid(first.pid) == first.pid
    descriptor = os.pidfd_open(first.pid)
    os.kill(first.pid, signal.SIGSEGV)
    assert first.wait() == -signal.SIGSEGV
    assert first.poll() == -signal.SIGSEGV
    os.close(descriptor)
    forge.close()
    assert gone(forge.pid)
    assert second.poll() is None, "the ranks go on without it"
    processes.kill_sessions([second.pid])
    assert second.wait() == -signal.SIGKILL


def test_an_exit_that_somebody_else_heard_of() -> None:
    child = subprocess.Popen(["true"])
    rank = ForkedRank(child.pid)
    child.wait()
    assert rank.poll() == 255


def test_the_forge_is_killed(begin: Starter, tmp_path: Path) -> None:
    """The ranks go on; what comes next is started cold."""
    forge = begin([sys.executable, script(tmp_path, SLEEPS)])
    rank = forge.fork(surroundings(), tmp_path / "log")
    assert rank is not None
    assert forge.pid is not None
    os.kill(forge.pid, signal.SIGKILL)
    assert gone(forge.pid)
    assert says(tmp_path / "log", "here")
    assert not forge.is_ready
    assert forge.fork(surroundings(), tmp_path / "other") is None
    assert "the process has ended" in forge.reason
    assert rank.poll() is None
    processes.kill_sessions([rank.pid])
    assert rank.wait() == -signal.SIGKILL


def test_the_forge_is_stopped(begin: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it for ever, and what it was asked for does not run later."""
    monkeypatch.setattr("ckpt.recovery.ranks.fork_client._FORK_SECONDS", 0.2)
    forge = begin([sys.executable, script(tmp_path, SLEEPS)])
    assert forge.pid is not None
    os.kill(forge.pid, signal.SIGSTOP)
    assert forge.fork(surroundings(), tmp_path / "log") is None
    assert forge.reason == "it has not answered for 0.2 s"
    assert gone(forge.pid)
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize("word", [b"", b"x"])
def test_a_rank_begins_only_when_it_is_told_to(
    begin: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: bytes
) -> None:
    """So none runs whose number was lost on the way."""
    forge = begin([sys.executable, script(tmp_path, SLEEPS)])
    monkeypatch.setattr("ckpt.recovery.ranks.fork_server.GO_BYTE", word)
    rank = forge.fork(surroundings(), tmp_path / "log")
    assert rank is not None
    assert rank.wait() == 1
    assert (tmp_path / "log").read_text() == ""


def test_a_log_that_cannot_be_written_and_one_that_can(begin: Starter, tmp_path: Path) -> None:
    forge = begin([sys.executable, script(tmp_path, SLEEPS)])
    with pytest.raises(FileNotFoundError):
        forge.fork(surroundings(), tmp_path / "none" / "log")
    with pytest.raises(IsADirectoryError):
        forge.fork(surroundings(), tmp_path)
    for _ in range(20):  # it can be ended from the first moment on
        rank = forge.fork(surroundings(), tmp_path / "log")
        assert rank is not None, forge.reason
        processes.kill_sessions([rank.pid])
        assert rank.wait() == -signal.SIGKILL


AGENT = """
    import json, os, sys, time
    from pathlib import Path
    from ckpt.recovery.ranks.fork_client import ForkServerClient

    folder = Path(sys.argv[1])
    forge = ForkServerClient.start([sys.executable, str(folder / "train.py")], os.environ, folder / "told.imports")
    while sys.argv[2] == "ranks" and not forge.is_ready:
        assert not forge.reason, forge.reason
        time.sleep(0.01)
    ranks = [forge.fork({**os.environ, "RANK": str(n)}, folder / f"log-{n}") for n in range(2) if forge.is_ready]
    (folder / "pids.new").write_text(json.dumps([forge.pid, *[rank.pid for rank in ranks]]))
    (folder / "pids.new").rename(folder / "pids")
    time.sleep(3600)
"""


@pytest.mark.parametrize("when", ["ranks", "importing"])
def test_the_agent_is_killed(tmp_path: Path, when: str) -> None:
    """Nothing goes on: neither the ranks, nor the forge, not even where an import hangs with the interpreter locked."""
    site = libraries(tmp_path, slow="import ctypes\nctypes.PyDLL(None).sleep(3600)\n")
    script(tmp_path, SLEEPS)
    told = {"slow": str(site / "slow" / "__init__.py")} if when == "importing" else {}
    (tmp_path / "told.imports").write_text(json.dumps({"modules": told, "environ": {}}))
    command = [sys.executable, script(tmp_path, AGENT, "agent.py"), str(tmp_path), when]
    agent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(site)})
    try:
        assert says(tmp_path / "pids", "]")
        pids = json.loads((tmp_path / "pids").read_text())
        assert len(pids) == (3 if when == "ranks" else 1)
        assert all(says(tmp_path / f"log-{n}", "here") for n in range(len(pids) - 1))
        assert all(processes.process_state(pid) for pid in pids)
    finally:
        agent.kill()
        agent.wait()
    assert gone(*pids)
