"""The file with the tokens that a node accepts, while it changes."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from ckpt.storage.node.token_check import TokenFile

OLD, NEW = "a" * 20, "b" * 20


def test_a_token_file_that_cannot_be_read_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that has no free descriptor at the moment of a change must not accept a revoked token permanently."""

    def fail(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    file = tmp_path / "token"
    file.write_text(f"{OLD}\n")
    tokens = TokenFile(file)
    file.write_text(f"{NEW}\n")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "read_text", fail)
        assert [tokens() for _ in range(3)] == [(OLD,)] * 3
    assert caplog.text.count("the previous tokens stay valid") == 1
    assert tokens() == (NEW,)


def test_an_empty_token_file_keeps_the_tokens_until_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{OLD}\n")
    tokens = TokenFile(file)
    file.write_text("")
    assert tokens() == (OLD,)
    file.write_text(f"{OLD}\n{NEW}\n")
    assert tokens() == (OLD, NEW)
