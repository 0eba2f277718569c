"""A member whose registers were lost votes again once it has the records of the others. Earlier proposals are refused then."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.damaged_namespaces import damage_record
from helpers.nodes import directories

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair, scrub
from ckpt.aggregator.maintenance.repair_leader import RepairLeader
from ckpt.aggregator.records.collected_tombstones import COLLECTED_REGISTER, is_collected_since
from ckpt.aggregator.records.tombstone_collection import collect_tombstones
from ckpt.storage.base.errors import Outdated
from ckpt.storage.registers.base import ABSENT_NAME, Ballot, Register, RegisterValue

MEMBERS = ("disk0", "disk1", "disk2")


def replace_disk(folder: Path, member: str) -> None:
    """Delete the registers of a member, as a new disk at its place has none."""
    for file in (folder / member).glob("registers.sqlite*"):
        file.unlink()


def repaired(folder: Path, count: int = len(MEMBERS)) -> Namespace:
    """Return the namespace after a scrub and a repair."""
    namespace = Namespace(directories(folder, count, redundancy="2x"))
    repair.repair_namespace(namespace, scrub.scrub_namespace(namespace))
    return namespace


def votes(namespace: Namespace, member: str) -> bool:
    """Return whether a member votes on registers that it does not have."""
    return isinstance(namespace.open_members[member].registers.read([ABSENT_NAME])[0], Register)


@pytest.fixture
def namespace(tmp_path: Path) -> Namespace:
    made = Namespace(directories(tmp_path, len(MEMBERS), redundancy="2x"))
    made.put("a", b"1")
    made.settle(["/a"])
    return made


def test_the_deletion_of_an_absent_file_keeps_no_replaced_disk_out(tmp_path: Path, namespace: Namespace) -> None:
    """It leaves a register without a value on the members that were there."""
    assert namespace.delete(["never"]) == []
    namespace.close()
    replace_disk(tmp_path, "disk2")
    again = repaired(tmp_path)
    assert votes(again, "disk2")
    assert scrub.scrub_namespace(again).is_whole
    assert again.get("a") == b"1"
    again.close()


def test_a_proposal_from_before_a_disk_was_replaced_is_refused(
    tmp_path: Path, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost disk had promised its ballot. The new disk may take part in another decision right after it was admitted."""
    monkeypatch.setattr(repair, "collect_tombstones", lambda _: 0)  # as if the repair was killed before that
    number, ballot = namespace.ring.fence_number, Ballot(7, "proposer")
    lost, other, _ = namespace.ring.replica_set("/x").members
    for member in (lost, other):
        (answer,) = namespace.open_members[member].registers.prepare(["/x"], ballot, number)
        assert isinstance(answer, Register)
        assert answer.promised_ballot == ballot
    namespace.close()
    replace_disk(tmp_path, lost)
    again = repaired(tmp_path)
    assert votes(again, lost)
    again.put("x", b"later")
    for member in (lost, other):
        with pytest.raises(Outdated):
            again.open_members[member].registers.accept([("/x", RegisterValue(b"earlier"))], ballot, fence_number=number)
    assert again.get("x") == b"later"
    again.close()


def test_a_replaced_disk_gets_the_log_of_collected_tombstones(tmp_path: Path, namespace: Namespace) -> None:
    """It belongs to no path. Without it, a file that was deleted meanwhile could be published again."""
    number = namespace.ring.fence_number
    namespace.delete(["a"])
    namespace.settle(["/a"])
    assert collect_tombstones(namespace, 0.0) == 1
    namespace.settle([COLLECTED_REGISTER])
    namespace.close()
    replace_disk(tmp_path, "disk1")
    again = repaired(tmp_path)
    assert votes(again, "disk1")
    (log,) = again.open_members["disk1"].registers.read([COLLECTED_REGISTER])
    assert isinstance(log, Register)
    assert log.value is not None
    assert is_collected_since(again, "a", number)
    again.close()


def test_the_repair_leader_admits_a_replaced_disk_of_a_namespace_that_is_whole(tmp_path: Path, namespace: Namespace) -> None:
    """Clients have given it all records again, so that a scrub finds nothing."""
    namespace.close()
    replace_disk(tmp_path, "disk2")
    again = Namespace(directories(tmp_path, len(MEMBERS), redundancy="2x"))
    again.settle(["/a"])
    assert scrub.scrub_namespace(again).is_whole
    assert not votes(again, "disk2")
    leader = RepairLeader(lambda: again, "me", 1e6)
    leader.repair_once(verify=False)
    leader.close(600)
    assert votes(again, "disk2")
    again.close()


@pytest.mark.parametrize("member", ["disk0", "disk1"])
def test_one_of_two_members_votes_again_after_its_disk_was_replaced(tmp_path: Path, member: str) -> None:
    """Each change needs both members, so the records of the other one are enough to restore those of the new disk."""
    made = Namespace(directories(tmp_path, 2, redundancy="2x"))
    made.put("a", b"1")
    made.settle(["/a"])
    made.close()
    shutil.rmtree(tmp_path / member)
    (tmp_path / member).mkdir()
    again = repaired(tmp_path, 2)
    assert votes(again, member)
    again.put("b", b"2")
    again.put("a", b"3")
    assert again.delete(["b"]) == ["b"]
    report = scrub.scrub_namespace(again)
    assert report.is_whole, report
    assert (again.get("a"), list(again.list(""))) == (b"3", ["a"])
    again.close()


@pytest.mark.parametrize("member", ["disk0", "disk1"])
def test_a_damaged_record_of_one_of_two_members_is_replaced(tmp_path: Path, member: str) -> None:
    """A repair replaces it, and so does a change of the file."""
    made = Namespace(directories(tmp_path, 2, redundancy="2x"))
    for name in ("a", "b"):
        made.put(name, b"1")
    made.settle(["/a", "/b"])
    for name in ("a", "b"):
        damage_record(tmp_path / member, name)
    made.put("b", b"2")
    made.close()
    again = repaired(tmp_path, 2)
    assert scrub.scrub_namespace(again).is_whole
    for name in ("a", "b"):
        (record,) = again.open_members[member].registers.read([f"/{name}"])
        assert isinstance(record, Register), record
    assert (again.get("a"), again.get("b")) == (b"1", b"2")
    again.close()
