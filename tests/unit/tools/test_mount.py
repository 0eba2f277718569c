"""How a mount ends when libfuse reports an error, with operations on a namespace on directories."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.nodes import directories

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.storage.base.errors import CkptError
from ckpt.tools import mount, unmount_signals
from ckpt.tools.mount_operations import MountOperations

fuse = pytest.importorskip("fuse", reason="FUSE is not installed", exc_type=ImportError)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[MountOperations], None]], None]]:
    """Yield a function that serves a mount whose libfuse calls some operations, and fails then with the status 1."""
    namespace = Namespace(directories(tmp_path, 3, redundancy="2x"))
    monkeypatch.setattr(mount, "open_namespace", lambda url: (namespace, ""))
    monkeypatch.setattr(mount, "unmount_on_signals", lambda folder: None)
    monkeypatch.setattr(fuse, "signal", signal.signal)

    def begin(calls: Callable[[MountOperations], None]) -> None:
        def fail(operations: MountOperations, *_: Any, **__: Any) -> None:
            calls(operations)
            raise RuntimeError(1)

        monkeypatch.setattr(fuse, "FUSE", fail)
        mount.serve_mount("ckpt://here/", tmp_path, {})

    yield begin
    namespace.close()


def begun(operations: MountOperations) -> int:
    """Mount, and return an open file with bytes."""
    operations("init", "/")
    handle = operations("create", "/file", 0o644, None)
    assert isinstance(handle, int)
    operations("write", "/file", b"here", 0, handle)
    return handle


def test_a_folder_that_cannot_be_mounted_is_an_error(serve: Callable[..., None]) -> None:
    with pytest.raises(CkptError, match="mounting ckpt://here/ at .* failed"):
        serve(lambda operations: None)


def test_an_unmount_that_meets_a_request_is_no_error(serve: Callable[..., None]) -> None:
    """The kernel answers libfuse with ECONNABORTED, although all files are closed."""
    serve(lambda operations: operations("flush", "/file", begun(operations)))


def test_writes_that_are_lost_in_an_unmount_are_an_error(serve: Callable[..., None]) -> None:
    with pytest.raises(CkptError, match="files: 1, such as file"):
        serve(begun)


def test_writes_to_a_deleted_file_are_not_lost(serve: Callable[..., None]) -> None:
    def deleted(operations: MountOperations) -> None:
        begun(operations)
        operations("unlink", "/file")

    serve(deleted)


def test_a_log_without_background_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(mount.command, ["--log", str(tmp_path / "log"), "ckpt://127.0.0.1:1/", str(tmp_path)])
    assert result.exit_code == 2
    assert "--log needs --background" in result.output


def test_a_closed_terminal_does_not_end_a_mount_with_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shell and the kernel may each send SIGHUP. The writes that were not synced would be lost."""
    receiver, sender = os.pipe()
    statuses: list[int] = []
    monkeypatch.setattr(unmount_signals, "_try_unmount", lambda _, option: None if option == "-uz" else "busy")
    monkeypatch.setattr(os, "_exit", statuses.append)
    os.write(sender, bytes([signal.SIGHUP, signal.SIGHUP, signal.SIGTERM]))
    unmount_signals._unmount_on_signal(receiver, tmp_path)
    os.close(receiver)
    os.close(sender)
    assert statuses == [128 + signal.SIGTERM]
