"""Answers that the protocol does not allow: too long ones, for which the client allocates no memory, none, and late ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from ckpt.storage.base.errors import StoreError, Unavailable
from ckpt.storage.node import wire
from ckpt.storage.node.client import NodeStore
from ckpt.storage.node.client_credentials import NodeCredentials


class LongAnswers(flight.FlightServerBase):  # type: ignore[misc]
    """A node whose answers are as long as the protocol allows, or, to `exists`, one byte longer."""

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[flight.Result]:
        if action.type == "exists":
            yield flight.Result(pa.py_buffer(bytes(wire.MESSAGE_BYTES + wire.FRAME_BYTES + 1)))
        else:
            yield flight.Result(wire.pack(bytes(wire.MESSAGE_BYTES - 100)))


def test_an_answer_longer_than_the_protocol_allows_is_refused() -> None:
    with LongAnswers("grpc+tcp://127.0.0.1:0") as server:
        store = NodeStore(f"127.0.0.1:{server.port}", NodeCredentials())
        with pytest.raises(StoreError, match="failed in exists"):
            store.exists("a")
        store.close()


class NoAnswers(flight.FlightServerBase):  # type: ignore[misc]
    """A server that answers `verify` late, and other calls with no message."""

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[flight.Result]:
        while action.type == "verify" and not context.is_cancelled():
            time.sleep(0.01)
        return iter(())


def test_an_empty_or_a_late_answer_is_no_answer() -> None:
    with NoAnswers("grpc+tcp://127.0.0.1:0") as server:
        store = NodeStore(f"127.0.0.1:{server.port}", NodeCredentials(deadline_seconds=0.1))
        for call in (partial(store.exists, "a"), partial(store.put, "a", b""), lambda: list(store.list_folders())):
            with pytest.raises(Unavailable, match="by this protocol"):
                call()
        with pytest.raises(Unavailable, match="did not answer verify within 1 s"):
            store.verify("a", [])
        store.close()
