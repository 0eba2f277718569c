"""A node that answers with a message longer than the protocol allows: the client allocates no memory for it."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from ckpt.storage.base.errors import StoreError
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
