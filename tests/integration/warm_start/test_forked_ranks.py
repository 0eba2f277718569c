"""A rank that the fork server starts behaves like one that was started cold."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import pytest
from helpers.fork_servers import PROGRAM, Starter, modules, run_cold, run_warm, script, surroundings, write_packages
from helpers.fork_servers import start_fork_server as start_fork_server

from ckpt.recovery.ranks.fork_client import ForkServers
from ckpt.training import import_report
from ckpt.training.heartbeat_page import HeartbeatPage

if sys.platform != "linux":
    pytest.skip("needs Linux: a fork server gives its children to another process", allow_module_level=True)


@pytest.mark.parametrize(
    "words",
    [
        [str(PROGRAM), "--lr", "1e-4", ""],
        ["-u", "-W", "ignore", "-Xutf8", "./../programs/process_surroundings.py"],
        ["-P", "process_surroundings.py", "-m"],
        ["-u", "-m", "process_surroundings", "a"],
        ["-bbIOO", "process_surroundings.py"],
    ],
)
def test_a_forked_rank_has_the_surroundings_of_a_cold_one(
    start_fork_server: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(PROGRAM.parent)
    command, page = [sys.executable, *words], str(tmp_path / "page")
    log = tmp_path / "log"
    assert run_cold(command, log, CKPT_PULSE=page) == 0, log.read_text()
    want = json.loads(log.read_text())
    fork_server = start_fork_server(command, import_report.report_path(page))
    assert fork_server.is_ready, fork_server.reason
    assert fork_server.note == ""
    for _ in range(2):  # the fork server can fork more than once
        log.unlink()
        assert run_warm(fork_server, log, CKPT_PULSE=page) == 0, log.read_text()
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


def test_a_forked_rank_ends_like_a_cold_one(start_fork_server: Starter, tmp_path: Path) -> None:
    """Exit status and output are equal, to the last byte."""
    command = [sys.executable, script(tmp_path, ENDS)]
    fork_server = start_fork_server(command)
    for end in range(16):
        started, forked = tmp_path / f"cold-{end}", tmp_path / f"warm-{end}"
        want = run_cold(command, started, end)
        assert run_warm(fork_server, forked, end) == want, end
        assert forked.read_text() == started.read_text(), end
    assert (tmp_path / "warm-3").read_text().count("File ") == 2


@pytest.mark.parametrize("text", ["x = = 1\n", "\ufeffprint('bom')\n", "# coding: latin-1\nprint('é')\n", "", "raise\n"])
@pytest.mark.parametrize("as_module", [False, True])
def test_any_valid_or_broken_script_runs_as_if_cold(
    start_fork_server: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, as_module: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    coding = "latin-1" if "latin" in text else "utf-8"
    Path("train.py").write_text(text, encoding=coding)
    command = [sys.executable, *(["-m", "train"] if as_module else ["train.py"])]
    want = run_cold(command, tmp_path / "cold")
    assert run_warm(start_fork_server(command), tmp_path / "warm") == want
    assert (tmp_path / "warm").read_text() == (tmp_path / "cold").read_text()


def test_a_forked_rank_can_start_processes_of_its_own(start_fork_server: Starter, tmp_path: Path) -> None:
    """They are spawned, forked, and served by a fork server: each finds the script and its classes."""
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
    fork_server = start_fork_server(
        command, modules("multiprocessing", "concurrent.futures", "concurrent.futures.process", "pickle")
    )
    assert fork_server.is_ready, fork_server.reason
    assert run_warm(fork_server, tmp_path / "log", 7) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text() == "3 __main__\nspawn 8 7\nfork 8 7\nforkserver 8 7\n"


def test_forked_ranks_can_use_torch(start_fork_server: Starter, tmp_path: Path) -> None:
    """Two ranks communicate by gloo, with data loader workers and random numbers of their own; torch was imported before the
    script."""
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
    fork_server = start_fork_server(command, modules("numpy", "torch", "torch.distributed", "torch.utils.data"))
    assert fork_server.is_ready, fork_server.reason
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [fork_server.fork(surroundings(rank, **at), tmp_path / f"log-{rank}") for rank in range(2)]
    assert [rank.wait() for rank in ranks if rank] == [0, 0], (tmp_path / "log-0").read_text()
    output = [(tmp_path / f"log-{rank}").read_text().split()[-6:] for rank in range(2)]
    assert [each[:3] for each in output] == [["True", "3.0", "28"]] * 2
    assert all(own_numbers != other_numbers for own_numbers, other_numbers in zip(output[0][3:], output[1][3:], strict=True))


def test_a_forked_rank_writes_its_heartbeat_page_and_its_child_does_not(start_fork_server: Starter, tmp_path: Path) -> None:
    """A forked child of a rank is not the rank; a process that the fork server has forked is."""
    text = """
        import os
        from ckpt.training import heartbeat_page
        heartbeat_page.own_page().beat(2, 41)
        if os.fork() == 0:
            os._exit(0 if heartbeat_page.own_page() is None else 1)
        assert os.wait()[1] == 0
    """
    page = HeartbeatPage(tmp_path / "page", new=True)
    fork_server = start_fork_server([sys.executable, script(tmp_path, text)], modules("ckpt", "ckpt.training.heartbeat_page"))
    rank = fork_server.fork(surroundings(CKPT_PULSE=str(tmp_path / "page")), tmp_path / "log")
    assert rank is not None
    assert rank.wait() == 0, (tmp_path / "log").read_text()
    assert (page.read().pid, page.read().step) == (rank.pid, 41)


def test_threads_of_openblas_survive_the_fork(start_fork_server: Starter, tmp_path: Path) -> None:
    """OpenBLAS starts threads when numpy is imported, and handles forks."""
    text = "import numpy as np\nprint(float((np.ones((900, 900)) @ np.ones((900, 900))).sum()))\n"
    fork_server = start_fork_server([sys.executable, script(tmp_path, text)], modules("numpy"), OMP_NUM_THREADS="4")
    assert (fork_server.is_ready, fork_server.note) == (True, ""), fork_server.reason
    for _ in range(2):
        (tmp_path / "log").unlink(missing_ok=True)
        assert run_warm(fork_server, tmp_path / "log", OMP_NUM_THREADS="4") == 0
        assert (tmp_path / "log").read_text() == "729000000.0\n"


def test_the_allocator_thread_of_pyarrow_survives_the_fork(start_fork_server: Starter, tmp_path: Path) -> None:
    """ckpt itself needs pyarrow."""
    text = """
        import sys
        there = "pyarrow.parquet" in sys.modules
        import pyarrow as pa, pyarrow.parquet as pq
        table = pa.table({"x": range(100_000)})
        pq.write_table(table, sys.argv[1])
        print(there, pq.read_table(sys.argv[1]).equals(table))
    """
    command = [sys.executable, script(tmp_path, text), str(tmp_path / "table")]
    fork_server = start_fork_server(command, modules("pyarrow", "pyarrow.parquet"))
    assert (fork_server.is_ready, fork_server.note) == (True, ""), fork_server.reason
    for _ in range(2):
        assert run_warm(fork_server, tmp_path / "log") == 0
    assert (tmp_path / "log").read_text() == "True True\n" * 2


def test_variables_that_libraries_set_stay_set(start_fork_server: Starter, tmp_path: Path) -> None:
    """The rank has a variable that an import sets; one that the script sets wins."""
    site = write_packages(tmp_path, sets="import os\nos.environ.setdefault('A_CACHE', '/a')\nos.environ['KMP_INIT'] = '1'\n")
    text = """
        import os
        import sets
        from ckpt.training import import_report
        import_report.write_report()
        print(os.environ["A_CACHE"], os.environ["KMP_INIT"], os.environ["RANK"])
    """
    command = [sys.executable, script(tmp_path / "here", text)]
    page, path = str(tmp_path / "page"), str(site)
    assert run_cold(command, tmp_path / "cold", CKPT_PULSE=page, PYTHONPATH=path) == 0
    fork_server = start_fork_server(command, import_report.report_path(page), PYTHONPATH=path)
    assert (fork_server.is_ready, fork_server.note) == (True, ""), fork_server.reason
    for rank in range(2):
        assert run_warm(fork_server, tmp_path / "warm", rank, PYTHONPATH=path) == 0
    assert (tmp_path / "warm").read_text() == "/a 1 0\n/a 1 1\n"


def test_a_run_starts_warm_after_a_rank_has_reported_its_imports(start_fork_server: Starter, tmp_path: Path) -> None:
    """A later report with more imports replaces the fork server; after a change of the script ranks start cold, and then warm
    again."""
    text = "import sys\nprint(*sorted({'wave', 'colorsys'} & sys.modules.keys()))\n"
    command, reported, log = [sys.executable, script(tmp_path, text)], tmp_path / "reported", tmp_path / "log"
    warm_starts = ForkServers(command)

    def report_imports(*names: str) -> None:
        found = modules(*names)
        found["modules"]["__main__"] = command[1]  # type: ignore[index]
        reported.write_text(json.dumps(found))

    def until_warm() -> None:
        deadline = time.monotonic() + 600
        while warm_starts._next or warm_starts.status_text != "the next start is warm":
            assert time.monotonic() < deadline, warm_starts.status_text
            warm_starts.update(surroundings(), reported)
            time.sleep(0.01)

    def start() -> str | None:
        log.unlink(missing_ok=True)
        rank = warm_starts.fork(surroundings(1), log)
        return None if rank is None else log.read_text() if rank.wait() == 0 else "failed"

    try:
        warm_starts.update(surroundings(), reported)
        assert warm_starts.status_text == "no warm start yet: the first rank of this host reports its imports at its first step"
        assert start() is None
        report_imports("colorsys")
        warm_starts.update(surroundings(), reported)
        until_warm()
        assert start() == "colorsys\n"
        report_imports("colorsys", "wave")
        warm_starts.update(surroundings(), reported)
        assert start() == "colorsys\n", "the old fork server does not serve until the new one is ready"
        until_warm()
        assert start() == "colorsys wave\n"
        report_imports("wave")
        warm_starts.update(surroundings(), reported)
        assert warm_starts._next is None, "a new fork server was started without new imports"
        Path(command[1]).write_text("print('new')\n")
        assert start() is None
        assert warm_starts.status_text == f"no warm start: {command[1]} has changed"
        warm_starts.update(surroundings(), reported)
        assert start() is None, "an import report from before the change is used"
        report_imports("wave")
        warm_starts.update(surroundings(), reported)
        until_warm()
        assert start() == "new\n"
    finally:
        warm_starts.close()
