"""A mount ends when its process gets a signal, and files that are open in it are kept until they are closed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.mounts import why_no_fuse
from helpers.node_fixtures import node as node
from helpers.nodes import NodeProcess
from helpers.processes import until

from ckpt.aggregator.file_io.namespace import open_namespace

pytestmark = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")

COMMAND = [sys.executable, "-m", "ckpt.tools.mount"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "mnt"
    made.mkdir()
    yield made
    subprocess.run(["fusermount3", "-uz", str(made)], capture_output=True, check=False)


def begin(node: NodeProcess, folder: Path, **environment: str) -> subprocess.Popen[str]:
    command = [*COMMAND, f"ckpt://{node.address}/", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    until(lambda: os.path.ismount(folder) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts(node: NodeProcess, folder: Path, number: signal.Signals) -> None:
    process = begin(node, folder)
    (folder / "file").write_text("here")
    process.send_signal(number)
    assert process.wait(600) == 0
    assert not os.path.ismount(folder)
    assert open_namespace(f"ckpt://{node.address}/")[0].get("file") == b"here"


def test_an_open_file_is_completed_before_the_mount_ends(node: NodeProcess, folder: Path) -> None:
    process = begin(node, folder)
    with (folder / "file").open("w") as file:
        file.write("begun, ")
        file.flush()
        process.send_signal(signal.SIGTERM)
        until(lambda: not os.path.ismount(folder))
        assert process.poll() is None
        file.write("ended")
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert "is still in use" in stderr
    assert open_namespace(f"ckpt://{node.address}/")[0].get("file") == b"begun, ended"


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in which each FUSE mount has a file that aborts its requests."""
    made = tmp_path / "connections"
    made.mkdir()
    done = subprocess.run(["mount", "-t", "fusectl", "none", str(made)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"aborting the requests of a mount needs root: {done.stderr}")
    yield made
    subprocess.run(["umount", str(made)], check=True)


def test_a_mount_whose_requests_are_aborted_names_the_lost_writes(node: NodeProcess, folder: Path, connections: Path) -> None:
    process = begin(node, folder)
    synced, lost = (os.open(folder / name, os.O_WRONLY | os.O_CREAT) for name in ("synced", "lost"))
    for file in (synced, lost):
        os.write(file, b"here")
    os.fsync(synced)
    (connections / str(os.minor(folder.stat().st_dev)) / "abort").write_text("1")
    for file in (synced, lost):
        with suppress(OSError):  # no process serves it any more
            os.close(file)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "writes that were not synced are lost (files: 1, such as lost)" in stderr
    assert open_namespace(f"ckpt://{node.address}/")[0].get("synced") == b"here"


def test_a_second_signal_ends_a_mount_at_once(node: NodeProcess, folder: Path) -> None:
    process = begin(node, folder)
    file = os.open(folder / "file", os.O_WRONLY | os.O_CREAT)
    process.send_signal(signal.SIGTERM)
    until(lambda: not os.path.ismount(folder))
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 128 + signal.SIGTERM
    with suppress(OSError):  # no process serves it any more
        os.close(file)


def test_a_mount_that_cannot_be_unmounted_says_so(node: NodeProcess, folder: Path, tmp_path: Path) -> None:
    program = shutil.which("fusermount3") or shutil.which("fusermount")
    assert program is not None
    link = tmp_path / "bin" / Path(program).name
    link.parent.mkdir()
    link.symlink_to(program)
    process = begin(node, folder, PATH=str(link.parent))
    link.unlink()
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"{folder} stays mounted (fusermount3: No such file or directory): install fuse3" in stderr


def test_a_mount_that_another_mount_namespace_has_says_so(node: NodeProcess, folder: Path) -> None:
    """A container that starts while the folder is mounted has a copy of the mount."""
    process = begin(node, folder)
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 600"]
    container = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert container.stdout is not None
        if not container.stdout.readline():
            pytest.skip("mount namespaces need root")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "container" in process.stderr.readline()
        assert not os.path.ismount(folder)
        assert process.poll() is None
    finally:
        container.kill()
        container.wait()
    assert process.wait(600) == 0


def test_a_background_mount_is_usable_when_the_command_returns(node: NodeProcess, folder: Path) -> None:
    """The process that serves it continues, with the same options."""
    command = [*COMMAND, "--background", "--umask", "077", "--uid=5", f"ckpt://{node.address}/", str(folder)]
    done = subprocess.run(command, timeout=600, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.path.ismount(folder)
    (folder / "file").write_text("here")
    assert (folder / "file").read_text() == "here"
    status = (folder / "file").stat()
    assert (status.st_mode & 0o777, status.st_uid) == (0o600, 5)


def process_that_serves(folder: Path) -> int:
    """Return the process whose command line ends with the folder of a mount."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if path.read_bytes().rstrip(b"\0").endswith(bytes(folder)):
                return int(path.parent.name)
    raise AssertionError(f"no process serves {folder}")


def test_a_background_mount_appends_its_later_messages_to_a_log(node: NodeProcess, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "mount.log"
    log.write_text("before\n")
    command = [*COMMAND, "--background", "--log", str(log), f"ckpt://{node.address}/", str(folder)]
    done = subprocess.run(command, timeout=600, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with (folder / "file").open("w") as file:
        file.write("here")
        os.kill(process_that_serves(folder), signal.SIGTERM)
        until(lambda: not os.path.ismount(folder))
    until(lambda: "is still in use" in log.read_text())
    assert log.read_text().startswith("before\n")


@pytest.mark.parametrize("with_log", [False, True])
def test_a_background_mount_without_a_node_fails(folder: Path, tmp_path: Path, with_log: bool) -> None:
    log = ["--log", str(tmp_path / "mount.log")] if with_log else []
    command = [*COMMAND, "--background", *log, "ckpt://127.0.0.1:1/", str(folder)]
    done = subprocess.run(command, timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "127.0.0.1:1" in done.stderr


def test_a_background_mount_whose_log_cannot_be_opened_fails(node: NodeProcess, folder: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "--background", "--log", str(tmp_path / "none" / "log"), f"ckpt://{node.address}/", str(folder)]
    done = subprocess.run(command, timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"opening {tmp_path}/none/log" in done.stderr
    assert not os.path.ismount(folder)
