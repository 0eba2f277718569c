"""The check of the token of each call to a node, and the file of the tokens that a node accepts."""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow.flight as flight

from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.base.fd_io import describe_unreadable_file

log = logging.getLogger("ckpt.node")

_MIN_TOKEN_CHARACTERS = 16


class TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call without a valid token, before the node handles it.

    gRPC has received the request by then, so a limit of its memory needs client certificates (docs/reference/namespace.md).
    """

    def __init__(self, tokens: Callable[[], tuple[str, ...]]) -> None:
        self._tokens = tokens

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str | bytes]]) -> None:
        given = [h if isinstance(h, bytes) else h.encode() for h in headers.get("authorization", [])]
        valid = [f"Bearer {token}".encode() for token in self._tokens()]
        if not any(hmac.compare_digest(g, v) for g in given for v in valid):
            raise flight.FlightUnauthenticatedError(
                "a wrong or missing token; give the one of this node (CKPT_TOKEN_FILE, or token_file in the TOML file)"
            )


class TokenFile:
    """The tokens in a file, one on each line. A call returns the present ones, so a change of the file needs no restart.

    With two lines, the node accepts both the old and the new token. If the file can't be used later, the last tokens stay
    valid, a warning is logged, and each call tries it again.

    Raises InvalidArgument if the file can't be used at first.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        """Guards `_last_stamp`, `_failed_stamp` and `_tokens`."""
        self._failed_stamp: tuple[int, ...] | None = None
        self._last_stamp = self._read_stamp()
        self._tokens = self._read_tokens()

    def __call__(self) -> tuple[str, ...]:
        with self._lock:
            stamp = self._read_stamp()
            if stamp != self._last_stamp:
                try:
                    self._tokens = self._read_tokens()
                    self._last_stamp, self._failed_stamp = stamp, None
                    log.info("%s has changed: its new tokens are valid from now on", self._file)
                except InvalidArgument as error:
                    if stamp != self._failed_stamp:
                        log.warning("%s; the previous tokens stay valid", error)
                    self._failed_stamp = stamp
            return self._tokens

    def _read_stamp(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._file)
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _read_tokens(self) -> tuple[str, ...]:
        try:
            tokens = tuple(filter(None, map(str.strip, self._file.read_text().splitlines())))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"the token file {self._file} can't be read: {describe_unreadable_file(error)}") from error
        if min(map(len, tokens), default=0) < _MIN_TOKEN_CHARACTERS:
            raise InvalidArgument(
                f"a token in {self._file} has {min(map(len, tokens), default=0)} characters; use {_MIN_TOKEN_CHARACTERS} or "
                "more, such as of `openssl rand -hex 16`"
            )
        return tokens
