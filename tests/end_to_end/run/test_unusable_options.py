"""Options of ckpt-run that cannot be used end it before the job starts."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest
from helpers.certificates import certificates
from helpers.faulty_runs import RUN, Faulty, Starter
from helpers.faulty_runs import start as start
from helpers.host_runs import job as job
from helpers.runs import assert_no_memory_is_left

from ckpt.recovery.policy.restart_decision import MAX_REPEATED_FAILURES


@pytest.mark.parametrize(
    ("url", "words", "times"),
    [
        ("ckpt://127.0.0.1:1/run", "127.0.0.1:1", MAX_REPEATED_FAILURES),  # a node at this address may be about to start
        ("{}/file/repo", "Not a directory", 1),
        ("/proc/nowhere", "has no directories", 1),
    ],
)
def test_a_job_with_an_unusable_url_is_given_up(start: Starter, tmp_path: Path, url: str, words: str, times: int) -> None:
    """The reason has the error of the ranks; the job ends at once where waiting does not help."""
    (tmp_path / "file").touch()
    run = start("--cold", url=url.format(tmp_path))
    assert run.end() == 1
    lines = run.messages.splitlines()
    found = re.search(rf"ckpt-run: ranks? [012, ]+ exited with status 1 \(.*{words}.*look at (.*)$", lines[-1])
    assert found, run.messages
    assert len(lines) == times
    assert words in Path(found[1]).read_text()
    assert "whether a rank has died" not in run.messages
    assert "Traceback" not in run.messages


def test_a_metrics_port_in_use_does_not_end_a_run(start: Starter) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        run = start("--metrics", where)
        assert run.end() == 0
    no_metrics = f"no metrics are served: {where} can't be listened on: Address already in use; give another --metrics"
    assert one_line(run) == no_metrics
    assert_no_memory_is_left(run.files)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--run-dir", "{}/file"], 1, "file can't be used: File exists; give another --run-dir"),
        (["--nnodes", "3", "--give-up", "0.5"], 1, "1 of 3 hosts joined within 0.5 s; start ckpt-run on more, or lower --min"),
        (["--nnodes", "2", "--min", "3"], 2, "--min 3 is more than the 2 hosts of --nnodes"),
        (["--nnodes", "2", "--state", "etcd://127.0.0.1:1/lab"], 1, "127.0.0.1:1"),
        (["-n", "100000000"], 2, "a job has at most 16,777,216 ranks and spares; give smaller numbers"),
        (["-n", "9000000", "--nnodes", "2", "--min", "1"], 2, "-n 9000000 on 2 hosts"),
        (["--nnodes", "2", "--spares", f"{1 << 70}"], 2, "at most 16,777,216 ranks and spares"),
        (["--restarts", f"{1 << 63}"], 2, "--restarts"),
        (["--address", "host..lab"], 1, "host..lab can't be listened on: it is not the name of a host; give one of"),
        (["--address", "x" * 64], 1, "it is not the name of a host"),
        (
            ["--nnodes", "2", "--state", "etcd://etcd..lab:2379/lab"],
            1,
            "etcd..lab can't be reached: it is not the name of a host",
        ),
        (["--nnodes", "2", "--state", "nosuch://127.0.0.1:1/lab"], 2, "write etcd://HOST:PORT,…/NAME"),
    ],
)
def test_unusable_options_are_refused_in_one_line(tmp_path: Path, options: list[str], status: int, words: str) -> None:
    (tmp_path / "file").touch()
    command = [*RUN, "--run-dir", str(tmp_path / "run"), *(option.format(tmp_path) for option in options), "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert status == 2 or len(done.stderr.splitlines()) == 1, done.stderr
    assert_no_memory_is_left(tmp_path / "run", socket.gethostname())


def test_a_key_of_another_certificate_is_refused_before_the_hosts_meet(tmp_path: Path) -> None:
    for each in ("old", "new"):
        (tmp_path / each).mkdir()
    (_, key), (certificate, _) = certificates(tmp_path / "old"), certificates(tmp_path / "new")
    command = [*RUN, "--run-dir", str(tmp_path / "run"), "--nnodes", "2", "--give-up", "1"]
    command += ["--tls-cert", str(certificate), "--tls-key", str(key), "--ca-file", str(certificate), "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, "give a chain and its key, PEM, not encrypted" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "run").exists()


def test_a_command_that_is_no_program_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("1 2 3")
    command = [*RUN, "--run-dir", str(tmp_path / "run"), "--", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    message = f"ckpt-run: {tmp_path}/data can't be started: Permission denied; give a command that can be started in a shell\n"
    assert done.stderr == message


def one_line(run: Faulty) -> str:
    """Return the output of a run, which must be a single line."""
    (line,) = run.messages.splitlines()
    return line.removeprefix("ckpt-run: ")
