"""Keeps the connections of a parent in its forked children, where gRPC can neither use nor free them.

gRPC has threads of its own, which a forked child does not have. A call there never returns, and the end of a connection aborts
the process or waits endlessly. So a child never frees a connection of its parent, and `GRPC` refuses calls in it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import pyarrow.flight as flight

from ckpt.storage.base.forks import ThreadedLibrary

GRPC = ThreadedLibrary("gRPC")

_connections: weakref.WeakSet[flight.FlightClient] = weakref.WeakSet()
_kept: list[list[flight.FlightClient]] = []
"""The connections at the moment of each fork that is in progress. Only the hooks below change it, in the thread that forks."""


def connect(location: str, **options: Any) -> flight.FlightClient:
    """Return a new connection, which a forked child will not free. options: of `FlightClient`."""
    client = flight.FlightClient(location, **options)
    _connections.add(client)
    return client


def _keep() -> None:
    """Hold a reference to each connection, before a fork: a garbage collection in the child may run at any moment."""
    _kept.append(list(_connections))


def _keep_no_longer() -> None:
    """Drop these references, in the parent after a fork."""
    _kept.pop()


def _keep_until_the_end() -> None:
    """Hold the references permanently, in the child: the end of the interpreter must not free the connections either."""
    for client in _kept[-1]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_keep, after_in_parent=_keep_no_longer, after_in_child=_keep_until_the_end)
