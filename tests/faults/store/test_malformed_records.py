"""Records written by a newer version, by mistake or by an attacker: readers ignore unknown fields and report malformed ones.

No record ends an agent, a node or a training run with a raw error. Each test prints its seed; CKPT_SEED=… repeats it.
"""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest

import ckpt
from ckpt.aggregator.cluster import etcd
from ckpt.aggregator.cluster.etcd_client import EtcdItem
from ckpt.aggregator.placement.rendezvous_hash import MemberLocation
from ckpt.aggregator.records import file_record, leader_election, record_ring
from ckpt.aggregator.records.file_record import FileRecord, RecordHead
from ckpt.format import json_records
from ckpt.groups import hello
from ckpt.groups.process_identity import ProcessIdentity
from ckpt.recovery.agent.metrics import render_metrics
from ckpt.recovery.coordinator.decision_input import DecisionInput
from ckpt.recovery.coordinator.transitions import draft_next_entries
from ckpt.recovery.goodput.ledger import LEDGER_FILE, read_ledger_file
from ckpt.recovery.policy.failure import Failure
from ckpt.recovery.policy.stragglers import RankPace
from ckpt.recovery.run_log import entry_drafts
from ckpt.recovery.run_log.agent_reports import AgentReport, HostFailure, SlowestRank, decode_reports
from ckpt.recovery.run_log.base import Draft
from ckpt.recovery.run_log.entry_schema import read_entry, read_row
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.recovery.run_log.run_state import RunState
from ckpt.repository import lease_records
from ckpt.repository.repository import MARKER, open_repository
from ckpt.storage.base.errors import CkptError, IntegrityError
from ckpt.storage.member.device import MemberInfo
from ckpt.storage.registers.base import RegisterValue
from ckpt.tiers import tier_note
from ckpt.training.heartbeat_records import BadLoss

TIMES = 300
STRANGE: Sequence[Any] = (
    None, True, False, 0, -1, 1 << 62, 1 << 63, 10**30, 1.5, float("nan"), float("inf"), "", "x", "\0", "9" * 5000, [], [[]],
    [None], {}, {"": None}, [1, 2, 3], ["a", "b"],
)  # fmt: skip


def _keys_of_containers(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a value with each key or index that it has."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield data, key
        yield from _keys_of_containers(value)


def _mutated(data: Any, rng: random.Random) -> Any:
    """Return a copy in which some fields have another type, are missing, or are new."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        keys = list(_keys_of_containers(data))
        if not keys or rng.random() < 0.03:
            return rng.choice(STRANGE)
        container, key = rng.choice(keys)
        what = rng.randrange(3)
        if what == 0:
            container[key] = copy.deepcopy(rng.choice(STRANGE))
        elif what == 1:
            del container[key]
        elif isinstance(container, dict):
            container[f"new-{rng.randrange(9)}"] = copy.deepcopy(rng.choice(STRANGE))
        else:
            container.insert(key, copy.deepcopy(rng.choice(STRANGE)))
    return data


def _with_new_fields(data: Any) -> Any:
    """Return the data as a newer version writes it: every mapping has one more field."""
    if isinstance(data, dict):
        return {**{key: _with_new_fields(value) for key, value in data.items()}, "added_later": [1, {"a": None}]}
    return [_with_new_fields(item) for item in data] if isinstance(data, list) else data


def _bytes(data: Any, rng: random.Random) -> bytes:
    """Return the data as JSON, which may be cut, have a changed byte, or be no JSON at all."""
    encoded = json.dumps(data).encode()
    how = rng.randrange(12)
    if how == 0:
        return encoded[: rng.randrange(len(encoded) + 1)]
    if how == 1:
        return rng.randbytes(rng.randrange(40))
    if how == 2:
        return b"[" * 100_000
    if how == 3 and encoded:
        at = rng.randrange(len(encoded))
        return encoded[:at] + rng.randbytes(1) + encoded[at + 1 :]
    return encoded


# --- the log of a run ------------------------------------------------------------------------------------------

SPEC = RunSpec(("python", "train.py"), 2, 2, 1)


def _agent(name: str, **more: Any) -> AgentReport:
    return AgentReport(name, f"{name}-1", 0.0, 1, "/p", "/l", "10.0.0.1", 7000, **more)


REPORT = _agent(
    "a",
    attempt=0,
    doing="running",
    wrong=HostFailure("diverged", (1,), "NaN", 0.5, BadLoss(7, "spike", 9.0, 3.0, 5)),
    uses_ckpt=True,
    step=3,
    slowest=SlowestRank(1, 3, 0.1, "step"),
    paces=(RankPace(0, 1.0, 0.9, 1.0, False),),
    nodes=("10.0.0.1:7001",),
    memory="ready",
    fresh="10.0.0.1:7001",
)


def _log() -> list[Any]:
    """Return the rows of a run with an entry of each kind."""
    living = {name: _agent(name) for name in "ab"}
    drafts = [entry_drafts.draft_run(0, "r", SPEC), Draft(0, "lead", "a leads the run", {"name": "a"})]

    def run_state() -> RunState:
        return RunState().apply_entries([read_entry(i + 1, json.dumps(row).encode()) for i, row in enumerate(_rows(drafts))])

    drafts += draft_next_entries(DecisionInput(run_state(), living, living, 1e9))
    note = {"straggler": 1, "host": "a", "times": 2.5, "seconds": 0.1}
    drafts.append(Draft(0, "note", "rank 1 is slow", note))
    drafts.append(Draft(0, "note", "spares", {"spares": 1, "came": 2, "restored": 3, "left_out": ""}))
    drafts.append(Draft(0, "stop", "drain", {"step": 9, "agreed": False, "ahead": 2}))
    drafts.append(
        entry_drafts.draft_failure(0, Failure("diverged", (1,), "NaN", 7, 5, 30.0, "a", BadLoss(7, "spike", 9.0, 3.0, 5)))
    )
    drafts += draft_next_entries(DecisionInput(run_state(), living, living, 0.0))
    drafts.append(entry_drafts.draft_memory(run_state(), run_state().memory[:1], "not needed any more"))
    drafts += draft_next_entries(DecisionInput(run_state(), living, living, 1e9))
    drafts.append(Draft(1, "request", "drain", {}))
    drafts.append(Draft(1, "end", "all ranks have ended with success", {"status": 0, "final": True}))
    assert [draft.kind for draft in drafts].count("start") == 2
    return _rows(drafts)


def _rows(drafts: Sequence[Draft]) -> list[Any]:
    found: list[Any] = json.loads(json.dumps([[1e9, d.attempt, d.kind, d.text, d.facts] for d in drafts]))
    return found


def _follow(rows: Sequence[Any], rng: random.Random | None = None) -> RunState:
    """Read a log as an agent does, up to each of its entries, and return the final state of the run."""
    entries = []
    for i, row in enumerate(rows):
        encoded = json.dumps(row).encode() if rng is None or rng.random() < 0.9 else _bytes(row, rng)
        entries.append(read_entry(i + 1, encoded))
        assert entries[-1].number == i + 1
        run_state = RunState().apply_entries(entries)
        assert run_state.number == i + 1
        if run_state.last is not None and run_state.spec is not None:
            for living in ({"a": REPORT, "b": _agent("b", attempt=0, doing="over")}, {"b": _agent("b")}):
                draft_next_entries(DecisionInput(run_state, living, living, 1e9, 1e9))
    render_metrics(entries, {}, True)
    return run_state


def test_a_malformed_entry_of_a_run_log_raises_no_raw_error(rng: random.Random) -> None:
    rows = _log()
    for _ in range(TIMES // 2):
        changed = list(rows)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(changed))
            changed[at] = _mutated(changed[at], rng)
        _follow(changed, rng)


def test_a_malformed_row_of_a_run_database_raises_no_raw_error(rng: random.Random) -> None:
    for _ in range(TIMES):
        at, attempt, kind, text, facts = rng.choice(_log())
        row = [at, attempt, kind, text, json.dumps(facts)]
        column = rng.randrange(len(row))
        row[column] = rng.choice([*STRANGE, b"", b"[" * 100_000, _bytes(_mutated(facts, rng), rng)])
        entry = read_row(1, *row)
        assert entry.number == 1
        assert isinstance(entry.text, str)


def test_new_fields_of_run_log_entries_are_ignored() -> None:
    def fields_but_last(run_state: RunState) -> dict[str, Any]:
        return {k: v for k, v in asdict(run_state).items() if k != "last"}

    rows = _log()
    newer = [[*row[:4], _with_new_fields(row[4]), "added later"] for row in rows]
    for i in range(1, len(rows) + 1):
        assert fields_but_last(_follow(newer[:i])) == fields_but_last(_follow(rows[:i])), rows[i - 1]


def test_an_entry_of_an_unknown_kind_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rows = _log()
    at = next(i for i, row in enumerate(rows) if row[2] == "start") + 1
    with caplog.at_level(logging.WARNING):
        run_state = _follow([*rows[:at], [1e9, 0, "pause", "from the future", {"seconds": 3}]])
    assert run_state.last is not None
    assert run_state.last.kind == "start"
    assert f"entry {at + 1} of the log of the run is skipped: its kind 'pause' is unknown" in caplog.text


def test_a_malformed_agent_report_does_not_affect_the_others(rng: random.Random, caplog: pytest.LogCaptureFixture) -> None:
    facts = json.loads(json.dumps(REPORT.to_facts()))
    assert decode_reports({"a": facts, "b": _agent("b").to_facts()}) == {"a": REPORT, "b": _agent("b")}
    assert decode_reports({"a": _with_new_fields(facts)}) == {"a": REPORT}
    run_state = _follow(_log()[:3])
    for _ in range(TIMES):
        reports = decode_reports({"a": _mutated(facts, rng), "b": _agent("b").to_facts()})
        assert reports["b"] == _agent("b"), "a valid report was not read"
        draft_next_entries(DecisionInput(run_state, reports, reports, 1e9, 1e9))
    with caplog.at_level(logging.WARNING):
        assert decode_reports({"c": {**facts, "name": "a"}, "d": {**facts, "name": "d", "port": "x"}}) == {}
    assert "agent c" in caplog.text
    assert "Report.port is 'x'" in caplog.text


def test_a_malformed_line_of_a_goodput_ledger_is_skipped(rng: random.Random, tmp_path: Path) -> None:
    line = {"at": 1e9, "name": "useful", "seconds": 2.0, "attempt": 0, "step": 3, "committed": 1, "since": 1.0}
    path = tmp_path / LEDGER_FILE
    for _ in range(TIMES):
        good = [json.dumps(line).encode(), json.dumps(_with_new_fields(line)).encode()]
        path.write_bytes(b"\n".join([good[0], _bytes(_mutated(line, rng), rng).replace(b"\n", b" "), good[1], b""]))
        found = read_ledger_file(path)
        assert len(found) in (2, 3)
        assert found[0] == found[-1]


# --- a namespace -----------------------------------------------------------------------------------------------


def test_a_malformed_node_announcement_raises_no_raw_error(rng: random.Random) -> None:
    facts = {"address": "h:7070", "domain": "r1/h1", "weight": 2, "device": "d"}
    key = "/ckpt/lab/known/h:7070"
    whole = etcd.AnnouncedNode("h:7070", "r1/h1", 2.0, "d")
    assert etcd._parse_announcement(EtcdItem(key, json.dumps(_with_new_fields(facts)).encode(), 1)) == whole
    for _ in range(TIMES):
        etcd._parse_announcement(EtcdItem(key, _bytes(_mutated(facts, rng), rng), 1))


def _packed(data: Any, rng: random.Random) -> bytes:
    try:
        encoded: bytes = msgpack.packb(data)
    except (OverflowError, ValueError):
        encoded = b"\xc1"
    return encoded if rng.random() < 0.8 else encoded[: rng.randrange(len(encoded) + 1)] + rng.randbytes(rng.randrange(3))


def test_a_malformed_record_of_a_namespace_is_read_or_refused(rng: random.Random) -> None:
    locations = tuple(MemberLocation(name, ("r", name)) for name in "abc")
    members = msgpack.unpackb(record_ring.encode_ring(record_ring.RecordRing(1, locations, 1, "n")).head)
    stored = file_record.encode_record(FileRecord(RecordHead("file", 3, 1.0, 1.0, "v", ()), inline_data=b"abc"))
    head, body = msgpack.unpackb(stored.head), msgpack.unpackb(stored.body)
    for _ in range(TIMES):
        leader_election._decode_leader(_packed(_mutated(["me", 3], rng), rng))
        for read in (
            partial(record_ring.decode_ring, RegisterValue(_packed(_mutated(members, rng), rng))),
            partial(file_record.decode_record, "/a", RegisterValue(_packed(_mutated(head, rng), rng), stored.body)),
            partial(file_record.decode_record, "/a", RegisterValue(stored.head, _packed(_mutated(body, rng), rng))),
        ):
            _read_or_refuse(read)
    assert leader_election._decode_leader(msgpack.packb(["me", 3, "added later"])) == leader_election._Leader("me", 3)


def _read_or_refuse(read: Callable[[], object]) -> None:
    try:
        read()
    except CkptError:
        pass


# --- a repository ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """The content of the records that a save has written."""

    commit: Mapping[str, Any]
    generation: Mapping[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> _Saved:
    folder = tmp_path_factory.mktemp("saved")
    with ckpt.Checkpointer(folder) as ck:
        ck.save(1, {"a": b"x"})
        ck.wait()
        generation = json.loads((folder / "generations/00000001.json").read_bytes())
    commit = json.loads(next(folder.rglob("commit.json")).read_bytes())
    return _Saved(*({k: v for k, v in each.items() if k not in ("digest", "kind", "format")} for each in (commit, generation)))


def test_a_malformed_commit_record_is_read_or_refused(rng: random.Random, saved: _Saved) -> None:
    whole = json_records.decode_commit(json_records.encode("commit", dict(saved.commit)), "here")
    assert json_records.decode_commit(json_records.encode("commit", _with_new_fields(saved.commit)), "here") == whole
    for _ in range(TIMES):
        changed = _mutated(saved.commit, rng)
        for data in (_record("commit", changed), _bytes(changed, rng)):
            _read_or_refuse(partial(json_records.decode_commit, data, "here"))


def test_a_malformed_lease_or_hello_raises_no_raw_error(rng: random.Random, saved: _Saved, tmp_path: Path) -> None:
    repo = open_repository(tmp_path)
    repo.ensure()
    name = "generations/00000001.json"
    repo.store.put(name, json_records.encode("generation", _with_new_fields(saved.generation)))
    owner = lease_records.lease_holder(repo, 1)
    assert owner == ProcessIdentity(**saved.generation["owner"]), "the process of a newer version counts as gone"
    for _ in range(TIMES):
        changed = _mutated(saved.generation, rng)
        if isinstance(changed, dict):
            repo.store.put(name, json_records.encode("generation", changed))
            _read_or_refuse(partial(lease_records.lease_holder, repo, 1))
        hello.decode_hello(_bytes(_mutated({**saved.generation["owner"], "parent": 1, "parent_started": "2"}, rng), rng))
    newer = {**saved.generation["owner"], "parent": 1, "parent_started": "2", "added_later": 1}
    assert hello.decode_hello(json.dumps(newer).encode()) == hello.Hello(owner, 1, "2")


def test_a_malformed_repository_marker_or_tier_note_is_read_or_refused(rng: random.Random, tmp_path: Path) -> None:
    repo = open_repository(tmp_path)
    repo.ensure()
    identity = repo.identity()
    note = {"id": identity, "places": ["/a", "/b"]}
    for _ in range(TIMES // 3):
        repo.store.put(MARKER, _record("repository", _mutated({"id": identity}, rng)))
        _read_or_refuse(repo.identity)
        repo.store.put(tier_note.TIER_NOTE_NAME, _record("tier", _mutated(note, rng)))
        try:
            found = tier_note.read_tier_note(repo)
            assert found is not None
            assert found.places[-1] + found.id
        except IntegrityError:
            pass
    repo.store.put(tier_note.TIER_NOTE_NAME, _record("tier", _with_new_fields(note)))
    assert tier_note.read_tier_note(repo) is not None


def _record(kind: str, body: Any) -> bytes:
    return json_records.encode(kind, body) if isinstance(body, dict) else b"[]"


def test_new_fields_of_member_information_are_ignored() -> None:
    from ckpt.storage.base.checked_decode import decode

    facts = {"identity": "i", "used_bytes": None, "free_bytes": 3, "state": "serving", "labels": [["rack", "r1"]], "uploads": 0}
    assert decode(MemberInfo, _with_new_fields(facts)) == MemberInfo("i", None, 3, "serving", (("rack", "r1"),), 0)
