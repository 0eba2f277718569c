"""A bucket makes a change of a register, and its client is fenced, or another one changes the register, before it knows.

The client must not take the change for refused: others may rely on it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance
from ckpt.aggregator.records import paxos
from ckpt.aggregator.records.eras import begin_era
from ckpt.storage.base.errors import Outdated, StoreError
from ckpt.storage.member.bucket import Bucket
from ckpt.storage.member.bucket_format import object_key
from ckpt.storage.registers.base import NO_BALLOT, Ballot, DirectChange, Registers, RegisterValue
from ckpt.storage.registers.fence_numbers import next_era
from ckpt.storage.testing import random_bytes

pytest_plugins = ["helpers.moto_server"]

CONTENT = random_bytes(300_001, 3)


@pytest.fixture
def registers(bucket: str) -> Registers:
    made = Bucket(f"{bucket}/a").registers
    made.mark_complete()
    return made


def run_after_next_put(
    monkeypatch: pytest.MonkeyPatch, registers: Registers, name: str, event: Callable[[], object], is_repeated: bool
) -> None:
    """Call `event` once the next put of a register has taken effect, and before the answer.

    is_repeated: whether the first answer gets lost. `put_if` then returns False, as that of the repeated put.
    """
    store = registers._store  # type: ignore[attr-defined]
    put_if, is_done = store.put_if, False

    def put_and_run(key: str, *arguments: Any) -> bool:
        nonlocal is_done
        is_put: bool = put_if(key, *arguments)
        if is_done or key != object_key(name):
            return is_put
        is_done = True
        event()
        return is_put and not is_repeated

    monkeypatch.setattr(store, "put_if", put_and_run)


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize("call", ["prepare", "accept", "change", "changes"])
def test_a_change_that_was_made_before_the_fence_is_not_refused_as_outdated(
    bucket: str, registers: Registers, call: str, is_repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Outdated` means that nothing was changed."""
    era = next_era(1)
    assert era is not None
    ballot, change = Ballot(2, "a"), DirectChange("/x", NO_BALLOT, RegisterValue(b"file"))
    slow = Bucket(f"{bucket}/a").registers
    run_after_next_put(monkeypatch, slow, "/x", lambda: registers.fence(era), is_repeated)
    with pytest.raises(StoreError, match="may have been changed") as error:
        if call == "prepare":
            slow.prepare(["/x"], ballot, 1)
        elif call == "accept":
            slow.accept([("/x", RegisterValue(b"file"))], ballot, fence_number=1)
        else:
            slow.change([change, *([DirectChange("/y", NO_BALLOT, RegisterValue(b""))] if call == "changes" else [])], "w", 1)
    assert not isinstance(error.value, Outdated)
    assert call == "prepare" or registers.scan("/x")
    with pytest.raises(Outdated):
        slow.change([change], "w", 1)


def test_a_change_that_was_made_and_replaced_before_its_answer_is_not_refused(
    bucket: str, registers: Registers, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, later = Bucket(f"{bucket}/a").registers, Ballot(2, "a")
    run_after_next_put(monkeypatch, slow, "/x", lambda: registers.accept([("/x", RegisterValue(b"later"))], later), True)
    with pytest.raises(StoreError, match="may have been changed"):
        slow.change([DirectChange("/x", NO_BALLOT, RegisterValue(b"file"))], "w")
    assert slow.change([DirectChange("/x", NO_BALLOT, RegisterValue(b"file"))], "w") == [False]


@pytest.mark.parametrize("is_fenced", [True, False])
def test_a_move_that_a_bucket_accepted_keeps_the_fragments_of_a_renamed_file(
    bucket: str, is_fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the answer arrives, others rename the file with its new fragments, and may begin a new era."""
    monkeypatch.setattr(paxos, "_CHANGE_SECONDS", 300.0)
    members = [{"url": f"{bucket}/{i}", "name": f"bucket{i}"} for i in range(3)]
    config = config_from_table("test", {"members": members, "redundancy": "1x"}, "the test")
    with closing(Namespace(config)) as mover, closing(Namespace(config)) as other:
        mover.put("a", CONTENT)
        file = mover.stat("a")
        assert file is not None
        assert file.layout is not None

        def rename() -> None:
            other.rename("a", "b")
            assert not is_fenced or begin_era(other) is not None

        first = mover.open_members[mover.ring.replica_set("/a").members[0]].registers
        run_after_next_put(monkeypatch, first, "/a", rename, not is_fenced)
        rebalance.drain_member(mover, file.layout.objects[0].member)
        assert other.get("b") == CONTENT
