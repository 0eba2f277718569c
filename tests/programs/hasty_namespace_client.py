"""A client of a namespace that reads a record from one of its members, and asks no quorum: namespace_client.py, weakened.

A test must find that what such clients see is not what one register would return.
"""

from __future__ import annotations

import random
import runpy
from collections.abc import Collection
from pathlib import Path

from ckpt.aggregator.records import paxos
from ckpt.aggregator.records.replica_set import ReplicaSet, undamaged_records


def has_member(replica_set: ReplicaSet, members: Collection[str]) -> bool:
    """Return whether one of these members keeps the record, which is not a quorum."""
    return not {*members}.isdisjoint(replica_set.members)


ReplicaSet.can_read = has_member  # type: ignore[method-assign]
paxos.is_unanimous = lambda got, is_quorum: bool(undamaged_records(got))
paxos.ReplicatedRegisters._preferred_members = lambda _, replicas: [random.choice(replicas.members)]  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("namespace_client.py")))
