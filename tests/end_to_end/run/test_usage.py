"""Wrong and plain usage of ckpt-run, and what it shows of a run."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import click
import pytest
from helpers.etcd_server import EtcdProcess, needs_etcd
from helpers.processes import until
from helpers.runs import Run, assert_no_memory_is_left
from helpers.runs import start as start

import ckpt
from ckpt.recovery.agent import agent
from ckpt.recovery.agent.host_options import HostOptions
from ckpt.recovery.goodput.ledger import total_seconds_by_category
from ckpt.recovery.ranks.host_identity import launcher_hint
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.agent_reports import AgentReport
from ckpt.recovery.run_log.base import Draft, LogEntry, RunLog, open_run_log
from ckpt.recovery.run_log.run_spec import AttemptHost, RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.recovery.run_log.sqlite import SqliteRunLog
from ckpt.storage.base.errors import CkptError
from ckpt.tools import run_queries
from ckpt.tools.common import Number
from ckpt.tools.run import command as run_command
from ckpt.tools.simulate import command as simulate
from ckpt.training.heartbeat_page import HeartbeatPage


def test_the_report_accounts_for_the_time_of_a_run(start: Callable[..., Run]) -> None:
    began = time.monotonic()
    run = start()
    run.until_step(12)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.end() == 0
    wall = time.monotonic() - began
    seconds = total_seconds_by_category(run.files)
    assert 0 < sum(seconds.values()) <= wall
    assert seconds["useful"] > 0
    assert seconds["spawn"] > 0
    assert {"restore", "stop"} <= set(seconds)  # and redo, unless the last step had just been saved
    command = [sys.executable, "-m", "ckpt.tools.run", "report", "--run-dir", str(run.files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 failure" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--", "/none/such"], 1, "/none/such can't be started: No such file or directory"),
        (["whyy"], 1, "there is no command whyy; did you mean `ckpt-run why`?"),
        (["-n", "0", "--", "true"], 2, "is not in the range"),
        ([], 2, "Missing argument"),
        (["--spares", "1", "--", "true"], 2, "--spares 1 needs --nnodes 2 or more"),
        (["--min", "2", "--", "true"], 2, "--min 2 is more than the 1 host of --nnodes"),
        (["--straggler", "1", "--", "true"], 2, "is not in the range"),
        (["--hang", "20", "--first-hang", "10", "--", "true"], 2, "--hang 20 is more than --first-hang 10: lower --hang"),
        (["--hang", "inf", "--first-hang", "10", "--", "true"], 2, "--hang inf is more than --first-hang 10: lower --hang"),
        (["--dir", "nowhere://x", "--", "true"], 1, '(pip install "ckpt-store[s3]"), or another scheme of fsspec\n'),
        (["--dir", "/proc/none", "--", "true"], 1, "--dir can't be used: "),
        (["--dir", str(Path(__file__).parent), "--", "true"], 1, "is not a checkpoint repository; name an empty or a new"),
        (["--dir", __file__, "--", "true"], 1, f"{__file__}/ckpt.json failed: Not a directory; a part of this path is a file"),
        (["--dir", "", "--", "true"], 2, "--dir is empty"),
        (["--", ""], 2, "the command is empty"),
        (["--address", "192.0.2.1", "--", "true"], 1, "give one of this host as --address"),
        (["--metrics", "127.0.0.1:99999", "--", "true"], 2, "write HOST:PORT, such as 127.0.0.1:9200"),
        (["--metrics", f"{'ü' * 70}.b:80", "--", "true"], 2, ".b:80: write HOST:PORT, such as 127.0.0.1:9200"),
        (["--launcher", "torchrun", "--", "true"], 1, "GROUP_RANK='x' is not a number of a host"),
        (["--launcher", "torchrun", "--name", "a", "--", "true"], 1, "GROUP_WORLD_SIZE is not set here, so torchrun has not"),
        (["--launcher", "slurm", "--", "true"], 1, "start it as `srun … ckpt-run --launcher slurm …`, or leave out --launcher"),
        (["--launcher", "k8s", "--", "true"], 2, "each would run a job of its own; give --nnodes, without the spares"),
        (["--nnodes", "2", "--name", "a/b", "--", "true"], 2, "'a/b' can't be the name of a host: give letters"),
        (["--adapt", "--nnodes", "2", "--", "true"], 2, "--adapt on several hosts needs a place that all of them share"),
        (["--launcher", "mpiexec", "--nnodes", "2", "--", "true"], 2, "leave out --nnodes"),
        (["--state", "http://h:1/lab", "--", "true"], 2, "--state http://h:1/lab: write etcd://HOST:PORT,…/NAME"),
        (["--state", "sqlite:///x", "--", "true"], 2, "--state sqlite:///x: write etcd://HOST:PORT,…/NAME"),
    ],
)
def test_wrong_usage_is_refused_with_advice(tmp_path: Path, arguments: list[str], status: int, message: str) -> None:
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(tmp_path / "run"), *arguments]
    environ = os.environ | {"GROUP_RANK": "x"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environ)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert status != 1 or len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("run/logs/0/rank-0.log"))
    assert_no_memory_is_left(tmp_path / "run")


def test_nan_is_refused_for_each_number_option() -> None:
    for option in ("grace", "patience", "give-up", "hang", "first-hang", "spike", "straggler", "straggler-after"):
        with pytest.raises(click.BadParameter, match="nan can't be used here"):
            run_command.main([f"--{option}", "nan", "--", "true"], standalone_mode=False)


def test_number_options_accept_only_valid_numbers() -> None:
    for text in ("nan", "inf", "-1", "x", ""):
        with pytest.raises(click.BadParameter):
            Number(0).convert(text, None, None)
    assert Number(0, never=True).convert("inf", None, None) == math.inf
    assert Number(0).convert("2.5", None, None) == 2.5
    with pytest.raises(click.BadParameter, match="nan can't be used here"):
        simulate.main(["--days", "nan"], standalone_mode=False)


def test_an_address_of_another_host_is_refused_without_a_file_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_shared_memory_folder", lambda: str(tmp_path))
    with contextlib.closing(SqliteRunLog(tmp_path)) as record:
        with pytest.raises(CkptError, match="give one of this host as --address"):
            agent.Agent(RunSpec(("true",), 1), HostOptions("a", tmp_path, "192.0.2.1"), record, print)
        assert not list(tmp_path.glob("ckpt-run-*"))


def test_a_missing_script_is_refused_before_a_run_begins(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt.tools.run", "-n", "2", "--run-dir", str(tmp_path / "run"), "--"]
    done = subprocess.run([*command, "python", "-u", "nosuch.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    message = "ckpt-run: python -u nosuch.py can't be started: there is no nosuch.py here; give the path of the script\n"
    assert done.stderr == message
    assert not (tmp_path / "run").exists(), "a run was begun"


@pytest.mark.parametrize("url", ["nowhere://x", "of-others"])
def test_a_program_with_an_unusable_url_is_not_restarted(tmp_path: Path, url: str) -> None:
    """The error is reported once, as another start would have the same result."""
    (tmp_path / "of-others").mkdir()
    (tmp_path / "of-others" / "file").touch()
    program = [sys.executable, "-c", f"import ckpt; ckpt.Checkpointer({url!r})"]
    command = [sys.executable, "-m", "ckpt.tools.run", "-n", "2", "--run-dir", str(tmp_path / "run"), "--", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert url in line
    why, _, log = line.partition("; look at ")
    assert why.endswith("before the first step; another start would not change that")
    assert url in Path(log).read_text()


def test_a_program_without_a_url_uses_the_dir_option(tmp_path: Path) -> None:
    """Without --dir the program is refused."""
    program = "import ckpt; ckpt.save({'a': 1}, step=3); ckpt.Checkpointer().close(); assert ckpt.load() == {'a': 1}"
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", "run"]
    for more, status in ((["--dir", "kept"], 0), ([], 1)):
        done = subprocess.run(
            [*command, *more, "--", sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False,
            cwd=tmp_path, env={name: value for name, value in os.environ.items() if name != "CKPT_DIR"},
        )  # fmt: skip
        assert done.returncode == status, done.stderr
    assert ckpt.open(tmp_path / "kept").steps() == [3]
    assert "no repository is named: give its URL, or start this by `ckpt-run --dir URL` (CKPT_DIR)" in done.stderr


def test_a_second_ckpt_run_in_a_folder_is_refused(start: Callable[..., Run]) -> None:
    run = start(steps=10_000)
    run.until_step(1)
    again = start()
    assert again.end() == 1
    assert "another ckpt-run works in" in again.messages
    assert len(again.messages.splitlines()) == 1
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT


@pytest.mark.parametrize("what", ["why", "status", "report", "plan --dry-run", "drain", "inject kill"])
@pytest.mark.parametrize("folder_exists", [False, True])
def test_a_query_without_a_run_is_refused_and_creates_nothing(tmp_path: Path, what: str, folder_exists: bool) -> None:
    if folder_exists:
        (tmp_path / "none").mkdir()
    command = [sys.executable, "-m", "ckpt.tools.run", *what.split(), "--run-dir", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert f"there is no run in {tmp_path / 'none'}; give its folder as --run-dir" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["none"] * folder_exists, "the query has created a file"
    if folder_exists:
        (tmp_path / "none" / "ledger-h1.jsonl").touch()
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert "has only the ledger of a host; also give the --state of the run" in done.stderr


def test_a_plain_command_runs_on_each_rank(tmp_path: Path) -> None:
    """The ranks do not use ckpt."""
    command = [sys.executable, "-m", "ckpt.tools.run", "-n", "2", "--show", "all", "--run-dir", str(tmp_path / "run")]
    command += ["--", "sh", "-c", "echo I am $RANK of $WORLD_SIZE"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["I am 0 of 2", "I am 1 of 2"]
    assert_no_memory_is_left(tmp_path / "run")


@pytest.fixture(params=["folder", pytest.param("etcd", marks=needs_etcd)], name="log_place")
def place_of_the_run_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str | None, str]]:
    """Yield the --state of a run, None if its log is in the folder `tmp_path / "run"`, and the advice to separate two jobs."""
    if request.param == "folder":
        yield None, "its own --run-dir"
        return
    server = EtcdProcess(tmp_path / "etcd")
    try:
        server.start()
        yield f"etcd://{server.endpoint.removeprefix('http://')}/lab", "its own --state and --run-dir"
    finally:
        server.kill()


def command_of_run(folder: Path, state: str | None, *words: str) -> list[str]:
    command = [sys.executable, "-m", "ckpt.tools.run", "--run-dir", str(folder / "run")]
    return [*command, *(() if state is None else ("--state", state)), *words]


def test_a_job_in_the_log_of_another_one_warns_of_it(tmp_path: Path, log_place: tuple[str | None, str]) -> None:
    state, advice = log_place
    stderr = []
    for program in (["true"], ["true"], ["sh", "-c", "true"]):
        command = command_of_run(tmp_path, state, "--", *program)
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0
        stderr.append(done.stderr)
    assert stderr[:2] == ["", ""]
    (line,) = stderr[2].splitlines()
    assert "another job has used this run log (true)" in line
    assert line.endswith(f"give each job {advice}")


def test_an_agent_ends_if_another_run_begins_in_its_log(tmp_path: Path, log_place: tuple[str | None, str]) -> None:
    state, advice = log_place
    begun = tmp_path / "begun"
    command = command_of_run(tmp_path, state, "--", "sh", "-c", f"touch {begun}; sleep 600")
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(begun.exists)
        with contextlib.closing(open_run_log(tmp_path / "run", state)) as run_log:
            until(lambda: append_other_run(run_log))
        _, stderr = running.communicate(timeout=600)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 1
    assert f"another run has begun in the same log; give each run {advice}" in stderr


def append_other_run(run_log: RunLog) -> bool:
    """Append the entry that begins another run, and return whether nobody has appended an entry at the same time."""
    entries = run_log.entries()
    spec = RunState().apply_entries(entries).spec
    assert spec is not None
    return run_log.append(entries[-1].number, [entry_drafts.draft_run(1, "other", spec)])


@needs_etcd
def test_a_job_beside_a_running_one_gets_advice_for_the_place_of_the_log(tmp_path: Path) -> None:
    server = EtcdProcess(tmp_path / "etcd")
    server.start()
    state = f"etcd://{server.endpoint.removeprefix('http://')}/lab"
    begun = tmp_path / "begun"
    running = subprocess.Popen(command_of_run(tmp_path, state, "--name", "a", "--", "sh", "-c", f"touch {begun}; sleep 600"))
    try:
        until(begun.exists)
        command = command_of_run(tmp_path / "other", state, "--name", "b", "--", "true")
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 1
        assert "another run uses this run log (1 host with 1 rank: sh -c touch" in done.stderr
        assert "give --nnodes on each, or give each job its own --state and --run-dir" in done.stderr
    finally:
        running.terminate()
        running.wait(600)
        server.kill()


@pytest.mark.parametrize(("launcher", "command", "better"), [
    ("local", "/usr/bin/mpirun", "`ckpt-run -n RANKS --launcher mpiexec -- PROGRAM`"),
    ("local", "srun", "`srun … ckpt-run --launcher slurm -- PROGRAM`"),
    ("slurm", "srun", ""), ("local", "python", ""),
])  # fmt: skip
def test_a_launcher_as_the_command_gets_a_hint(launcher: str, command: str, better: str) -> None:
    hint = launcher_hint(launcher, [command, "-n", "3"])
    assert better in hint
    assert bool(hint) == bool(better)


# Only root may be able to read the interpreter and the package, so all modules are imported before.
_AS_NOBODY = """
import os, pkgutil, importlib
from ckpt import recovery, storage, tools
from ckpt.tools import run
for package in (recovery, storage, tools):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ImportError:  # an optional package is missing
            pass
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
run.main()
"""


def test_another_user_can_query_a_run(start: Callable[..., Run], tmp_path: Path) -> None:
    """The user learns why other commands are refused: the files of the run belong to somebody else."""
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)

        def query(*words: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", _AS_NOBODY, *words, "--run-dir", f"{folder}/run"]
            return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd="/")

        (tmp_path / "job").symlink_to(folder)
        run = start(steps=10_000)
        run.until_step(3)
        status = query("status")
        assert (status.returncode, status.stderr) == (0, "")
        assert "only the user of the run can see its ranks" in status.stdout
        assert "rank 1 was killed by SIGKILL" in query("plan", "--fail", "1").stdout
        for words in (("drain",), ("inject", "kill")):
            assert "run the command as the user of the run" in query(*words).stderr
        run.process.terminate()
        assert run.end() == 128 + signal.SIGTERM
        for words in (("why",), ("report",)):
            done = query(*words)
            assert (done.returncode, done.stderr) == (0, "")
        assert "the run has ended: " in query("status").stdout
        assert not list(Path(folder, "run").glob("run.sqlite-*")), "a query has left files of the database"


def test_status_shows_only_ranks_of_the_present_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A host whose ranks were ended still has their pages, as a spare or until its next ranks run."""
    drafts = [entry_drafts.draft_run(0, "r", RunSpec(("true",), 1, hosts=2, least=1))]
    for attempt, hosts in enumerate(("ab", "b")):
        members = [asdict(AttemptHost(name, f"{name}-1", i, 1)) for i, name in enumerate(hosts)]
        facts = {"ranks": len(members), "members": members, "address": "a", "port": 1, "memory": []}
        drafts.append(Draft(attempt, "start", "ranks", facts))
    entries = [LogEntry(1 + i, 0.0, d.attempt, d.kind, d.text, dict(d.facts)) for i, d in enumerate(drafts)]
    reports = {}
    for name, attempt in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        pulse = HeartbeatPage(tmp_path / name / f"{attempt}-0", new=True)
        pulse.attach_process()
        pulse.beat(2, 70 + attempt)
        pulse.close()
        doing: Literal["running", "idle"] = "running" if attempt else "idle"
        reports[name] = AgentReport(name, f"{name}-1", 0.0, 1, str(tmp_path / name), "logs", "a", 1, attempt, doing)
    monkeypatch.setattr(run_queries, "_read_entries", lambda *_: entries)
    monkeypatch.setattr(run_queries, "_living_agents", lambda *_: reports)
    assert run_queries.status.main(["--run-dir", str(tmp_path)], standalone_mode=False) == 0
    shown = capfd.readouterr().out
    assert " 71 " in shown
    assert " 70 " not in shown, "status shows a rank of an earlier attempt"
    assert re.search("^a +spare", shown, re.MULTILINE)
    reports["b"] = replace(reports["b"], attempt=0)
    assert run_queries.status.main(["--run-dir", str(tmp_path)], standalone_mode=False) == 0
    shown = capfd.readouterr().out
    assert re.search("^b +waits", shown, re.MULTILINE)
    assert "no rank runs now; start: ranks" in shown


def test_a_page_without_room_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "0-0"))):
        HeartbeatPage(tmp_path / "0-0", new=True)
    assert not (tmp_path / "0-0").exists()
