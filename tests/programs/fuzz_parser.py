"""Feed a parser of the product with inputs that reach new code: `fuzz_parser.py PARSER CORPUS -runs=N …`, by atheris.

A parser may raise only the errors that its docstring names. The corpus begins with what the product itself writes; libFuzzer
changes it, keeps inputs that reach new lines, and ends the process at any other error, or beyond the memory limit. With
`--no-errors` no error is allowed. PARSER is a name, or all: the first byte of an input then selects the parser.
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import atheris
import msgpack

with atheris.instrument_imports(include=["ckpt"]):
    from ckpt.aggregator.cluster.config import config_from_table, parse_namespace_url, parse_tables
    from ckpt.aggregator.cluster.etcd import parse_etcd_url
    from ckpt.aggregator.placement.redundancy import Redundancy, parse_redundancy
    from ckpt.aggregator.placement.rendezvous_hash import MemberLocation
    from ckpt.aggregator.records import file_record, record_ring
    from ckpt.aggregator.records.file_record import FileLayout, FileRecord, Fragment, MemberObject, RecordHead, Stripe
    from ckpt.format import json_records, manifest
    from ckpt.format.json_records import CommitRecord, StepFile
    from ckpt.groups import hello
    from ckpt.recovery.run_log import agent_reports, entry_schema
    from ckpt.recovery.run_log.agent_reports import AgentReport
    from ckpt.repository.checkpoint import Checkpoint
    from ckpt.storage.base.checked_decode import Malformed, read_json
    from ckpt.storage.base.errors import CkptError
    from ckpt.storage.node import wire
    from ckpt.storage.registers.base import Ballot, Register, RegisterValue, decode_ballot, encode_ballot
    from ckpt.storage.remote.object_store import ObjectStore
    from ckpt.tools.import_paddle import read_state as read_paddle_file
    from ckpt.tools.import_safetensors import read_safetensors_file
    from ckpt.tools.import_tensorflow import read_state as read_tensorflow_index

from helpers.tensorflow_indexes import encode_index

COMMIT = CommitRecord(
    7, 2, "2026-01-01T00:00:00Z", 2, (StepFile("steps/7/manifest/0-2-1.parquet", 10, "00" * 16),),
    (StepFile("steps/7/manifest/0-2-1.json", 9, "11" * 16),), (StepFile("steps/7/pack/0-2-1.pack", 4096),), 3, 4000, 4096,
    0, None, "0.1.0",
)  # fmt: skip
RING = record_ring.RecordRing(3, (MemberLocation("a", ("rack",)), MemberLocation("b"), MemberLocation("c")), 1, "ns")

FILE = file_record.encode_record(
    FileRecord(
        RecordHead("file", 4096, 1.0, 1.0, "v"),
        layout=FileLayout(
            Redundancy(1, 1), (MemberObject("a", "o1"), MemberObject("b", "o2")),
            (Stripe(0, 4096, (Fragment(0, 0, b"12345678"), Fragment(1, 0, b"12345678")), 4096),),
        ),
    )
)  # fmt: skip
UNCHANGED = b"\x0f" * 64
"""The input of libFuzzer with which `_changed` changes nothing."""
ANSWERS = wire.pack(wire.encode_answers([Register(Ballot(1, "a"), Ballot(1, "a"), RegisterValue(b"x")), Register()]))


@dataclass(frozen=True)
class Parser:
    """A parser with the errors that it may raise, and inputs to begin with."""

    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    inputs: Callable[[], Sequence[bytes]]


def _signed(data: bytes, kind: str) -> bytes:
    """Return a record of these JSON fields with a valid digest: otherwise no input would get past the digest."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return data
    body = {k: v for k, v in body.items() if k not in ("digest", "kind", "format")} if isinstance(body, dict) else {}
    return json_records.encode(kind, body)


def _strange_value(draw: atheris.FuzzedDataProvider, depth: int = 0) -> Any:
    """Return a value of messages: a number, a text, bytes, None or a list."""
    kind = draw.ConsumeIntInRange(0, 6 if depth < 3 else 4)
    if kind == 0:
        return draw.ConsumeIntInRange(-(1 << 63), (1 << 64) - 1)
    if kind == 1:
        return draw.ConsumeUnicodeNoSurrogates(12)
    if kind in (2, 3, 4):
        return draw.ConsumeBytes(12) if kind == 2 else draw.ConsumeRegularFloat() if kind == 3 else None
    return [_strange_value(draw, depth + 1) for _ in range(draw.ConsumeIntInRange(0, 5))]


def _changed(value: Any, draw: atheris.FuzzedDataProvider) -> Any:
    """Return a value of messages in which some parts are replaced, left out or repeated."""
    choice = draw.ConsumeIntInRange(0, 15)
    if choice == 0 or not isinstance(value, (list, tuple)):
        return _strange_value(draw) if choice in (0, 1) else value
    items = [_changed(item, draw) for item in value]
    if choice == 1 and items:
        items.pop(draw.ConsumeIntInRange(0, len(items) - 1))
    if choice == 2 and items:
        items.append(items[draw.ConsumeIntInRange(0, len(items) - 1)])
    return items


def _change_message(written: bytes) -> Callable[[bytes], bytes]:
    """Return a function from an input of libFuzzer to a well-formed message that differs from the one that was written."""
    value = msgpack.unpackb(written)
    return lambda data: msgpack.packb(_changed(value, atheris.FuzzedDataProvider(data)))


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode("utf-8", "replace"))


def _parse_tree(data: bytes) -> object:
    class Step(Checkpoint):
        def verified(self, file: StepFile) -> bytes:
            return data

    step = Step(ObjectStore.__new__(_NoStore), COMMIT)
    return step.tree(), step.layouts()


class _NoStore(ObjectStore):
    url = "memory://fuzz"


def _parse_manifest(data: bytes) -> object:
    found = manifest.decode(data, "manifest")
    return found.leaves(), found.rows, found.totals(), found.blocks()


def _manifests() -> list[bytes]:
    import numpy as np

    import ckpt

    folder = tempfile.mkdtemp()
    ckpt.save({"w": np.arange(12.0).reshape(3, 4), "b": {"c": np.ones(2)}}, folder, 1)
    return [p.read_bytes() for p in Path(folder).rglob("*.parquet")]


def _parse_file_record(data: bytes) -> object:
    """The first byte is the length of the head."""
    head_bytes = data[0] if data else 0
    return file_record.decode_record("a", RegisterValue(data[1 : 1 + head_bytes], data[1 + head_bytes :]))


def _parse_toml(data: bytes) -> object:
    table = parse_tables(data, Path("a file")).get("x", {})
    if isinstance(table, dict) and isinstance(table.get("members"), str):  # the URL of an etcd, which would be asked
        return None
    return config_from_table("x", table, "a file")


def _in_a_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    def parse(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            path.write_bytes(data)
            return read(path)

    return parse


def _safetensors() -> list[bytes]:
    header = {"__metadata__": {"tied": '{"b": "a"}'}, "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    text = json.dumps(header).encode()
    return [len(text).to_bytes(8, "little") + text + bytes(24)]


def _paddle_files() -> list[bytes]:
    import numpy as np

    state = {"w": np.ones(2, np.float32), "StructuredToParameterName@@": {"w": "w_0"}, "n": (1, [2.5, None])}
    return [pickle.dumps(state, protocol) for protocol in (2, 4)]


_change_ring = _change_message(record_ring.encode_ring(RING).head)
_change_file = _change_message(FILE.body)
_change_answers = _change_message(ANSWERS)

PARSERS: dict[str, Parser] = {
    "commit": Parser(
        lambda data: json_records.decode_commit(data, "commit"), (CkptError,), lambda: [json_records.encode_commit(COMMIT)]
    ),
    "commit-fields": Parser(
        lambda data: json_records.decode_commit(_signed(data, "commit"), "commit"), (CkptError,),
        lambda: [json.dumps(asdict(COMMIT)).encode()],
    ),
    "manifest": Parser(_parse_manifest, (CkptError,), _manifests),
    "tree": Parser(
        _parse_tree, (CkptError,),
        lambda: [b'{"format":1,"tree":{"dict":{"w":{"array":"w"},"n":3}}}', b'{"format":1,"tree":{"dict":{}},"layouts":["a"]}'],
    ),
    "file-record": Parser(
        _parse_file_record, (CkptError,), lambda: [bytes([len(FILE.head)]) + FILE.head + FILE.body]
    ),
    "ring": Parser(
        lambda data: record_ring.decode_ring(RegisterValue(data)), (CkptError,), lambda: [record_ring.encode_ring(RING).head]
    ),
    "ring-fields": Parser(
        lambda data: record_ring.decode_ring(RegisterValue(_change_ring(data))), (CkptError,), lambda: [UNCHANGED]
    ),
    "file-record-fields": Parser(
        lambda data: file_record.decode_record("a", RegisterValue(FILE.head, _change_file(data))), (CkptError,),
        lambda: [UNCHANGED],
    ),
    "answers-fields": Parser(
        lambda data: wire.decode_answers(wire.unpack(_change_answers(data))), (ValueError, TypeError, LookupError),
        lambda: [UNCHANGED],
    ),
    "ballot": Parser(decode_ballot, (ValueError,), lambda: [encode_ballot(Ballot(5, "p", 1, "w"))]),
    "message": Parser(wire.unpack, (ValueError,), lambda: [wire.pack([1, "a", b"b", None, [2.5]])]),
    "answers": Parser(
        lambda data: wire.decode_answers(wire.unpack(data)), (ValueError, TypeError, LookupError),
        lambda: [wire.pack(wire.encode_answers([Register(Ballot(1, "a"), Ballot(1, "a"), RegisterValue(b"x"))]))],
    ),
    "error": Parser(wire.decode_error, (), lambda: [wire.encode_error(CkptError("a"))]),
    "hello": Parser(hello.decode_hello, (), lambda: [hello.own_hello().encode()]),
    "log-entry": Parser(
        lambda data: entry_schema.read_entry(1, data), (),
        lambda: [b'[1.5, 1, "failure", "x", {"host": "a", "kind": "exit", "code": 1}]', b'[1.5, 1, "note", "x", {}]'],
    ),
    "report": Parser(
        lambda data: agent_reports.decode_report(read_json(data)), (Malformed,),
        lambda: [json.dumps(asdict(AgentReport("a", "1", 1.5, 7, "/p", "/l", "h", 80))).encode()],
    ),
    "namespace-url": Parser(
        _text(parse_namespace_url), (CkptError,), lambda: [b"ckpt://a:1,b:2/run?redundancy=2x&near=a:1"]
    ),
    "etcd-url": Parser(_text(parse_etcd_url), (CkptError,), lambda: [b"etcd://a:1,b:2/cluster"]),
    "redundancy": Parser(_text(parse_redundancy), (CkptError,), lambda: [b"2x", b"4+2", str(Redundancy(4, 2)).encode()]),
    "safetensors": Parser(_in_a_file(read_safetensors_file, "x.safetensors"), (CkptError,), _safetensors),
    "paddle-pickle": Parser(_in_a_file(read_paddle_file, "x.pdparams"), (CkptError,), _paddle_files),
    "tensorflow-index": Parser(
        _in_a_file(read_tensorflow_index, "x.index"), (CkptError,), lambda: [encode_index({"": {1: 1}})]
    ),
    "configuration": Parser(
        _parse_toml, (CkptError,),
        lambda: [b'[namespaces.x]\nmembers = [{url = "a:1"}, {url = "/d", weight = 2.0}]\nredundancy = "2x"\n'],
    ),
}  # fmt: skip


def main() -> None:
    name, corpus, *options = sys.argv[1:]
    are_errors_allowed = "--no-errors" not in options
    parsers = list(PARSERS.values()) if name == "all" else [PARSERS[name]]

    def feed(data: bytes, must_parse: bool = False) -> None:
        parser = parsers[data[0] % len(parsers) if data else 0]
        allowed = parser.errors if are_errors_allowed else ()
        try:
            parser.parse(data[1:])
        except allowed:
            assert not must_parse, f"{data[1:]!r} is refused, which the product writes"

    for number, parser in enumerate(parsers):
        for count, written in enumerate(parser.inputs()):
            data = bytes([number]) + written
            feed(data, must_parse=True)
            Path(corpus, f"written-{number}-{count}").write_bytes(data)
    logging.disable()
    atheris.Setup([sys.argv[0], corpus, *(option for option in options if option != "--no-errors")], feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
