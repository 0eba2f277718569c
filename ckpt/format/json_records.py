"""The small JSON records of a repository, and proof that each is whole.

A record is canonical JSON (sorted keys, no spaces, ASCII) with a `digest` over itself without that key. What is read
must be exactly what would be written, so that any changed byte is found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from ckpt.errors import FormatError
from ckpt.format.digest import algorithm_of_hex, digest
from ckpt.format.signature import NO_KEYS, Keys, Signature
from ckpt.format.training_lines import Ancestry, TrainingLine, parse_line
from ckpt.storage.base.checked_decode import Malformed
from ckpt.storage.base.checked_decode import decode as from_data
from ckpt.storage.base.errors import IntegrityError
from ckpt.storage.base.store import Store

T = TypeVar("T")

FORMAT_VERSION = 1

MAX_RECORD_BYTES = 64 << 20
"""The longest record. A step of a million packs has one of this size."""

MAX_MANIFEST_BYTES = 2 << 30
MAX_TREE_BYTES = 1 << 30
MAX_PART_BYTES = MAX_MANIFEST_BYTES + MAX_TREE_BYTES
"""The longest files of other kinds. A step of ten million arrays stays below. Parsing takes some ten times as much memory."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that belongs to a step: its name below the root, length and digest (packs: None, their blocks have them)."""

    name: str
    nbytes: int
    digest: str | None = None
    """Its length tells the algorithm: 32 hexadecimal digits of xxh3-128, or 64 of blake3."""

    def matches(self, data: bytes) -> bool:
        """Whether these are the bytes of the file."""
        return len(data) == self.nbytes and digest(algorithm_of_hex(self.digest), data).hex() == self.digest


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What makes a step exist."""

    step: int
    generation: int
    created: str
    """UTC, ISO 8601."""
    world_size: int
    manifests: tuple[FileRecord, ...]
    trees: tuple[FileRecord, ...]
    packs: tuple[FileRecord, ...]
    """Every pack that the manifests refer to, also those of earlier steps."""
    leaves: int
    raw_bytes: int
    """Of all leaves."""
    written_bytes: int
    """Of the packs that this step added."""
    attempt: int
    """How many times this step had been tried before in this generation."""
    next_save: int | None
    """The step that the ranks of the group save next, where that is counted in seconds."""
    version: str
    """Of the software that wrote it."""
    line: int = 0
    """The line of training that the step is on."""
    left: Ancestry = ()
    """Of older lines: the last step that belongs to the history of this one. See lines.py."""
    signature: Signature | None = None
    """Of all the rest of the record; None where it was saved without a key."""

    @property
    def training_line(self) -> TrainingLine:
        """The line that the step is on."""
        return TrainingLine(self.line, self.left)

    def files(self) -> list[str]:
        """The names of all files that make up the step, but for the record itself."""
        return [f.name for f in (*self.manifests, *self.trees, *self.packs)]

    @property
    def save_order(self) -> tuple[int, int]:
        """Grows with each save of a step: generation and serial number, which its files are named by."""
        attempt = self.manifests[0].name.rpartition("/")[2].partition(".")[0] if self.manifests else ""
        serial = attempt.rpartition("-")[2]
        return self.generation, int(serial) if serial.isdecimal() else 0


def encode(kind: str, body: dict[str, Any]) -> bytes:
    """The bytes of a record."""
    body = {**body, "kind": kind, "format": FORMAT_VERSION}
    return _canonical_json({**body, "digest": _body_digest(body)})


def decode(kind: str, data: bytes, where: str) -> dict[str, Any]:
    """The content of a record; IntegrityError where a byte was changed, FormatError where a newer version wrote it."""
    if len(data) > MAX_RECORD_BYTES:
        raise IntegrityError(
            f"{where} has {len(data)} bytes, and a record has at most {MAX_RECORD_BYTES}: {_damage_text(where)}"
        )
    try:
        body = json.loads(data)
        claimed = body.pop("digest")
        version = body["format"]
        if _canonical_json({**body, "digest": claimed}) != data or claimed != _body_digest(body):
            raise ValueError("its digest does not match")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(_damage_text(where)) from error
    require_known_format(version, where)
    if body.get("kind") != kind:
        raise IntegrityError(f"{where} is a {body.get('kind')!r} record, not a {kind!r} record")
    return body  # type: ignore[no-any-return]


def load(store: Store, kind: str, name: str) -> dict[str, Any]:
    """The content of a record that lies in a store; raises NotFound, and what `decode` raises."""
    return decode(kind, store.get_up_to(name, MAX_RECORD_BYTES), f"{store.url}/{name}")


def require_known_format(version: Any, where: str) -> None:
    """Raise FormatError where a file is of a newer format."""
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise FormatError(
            f"{where} has format version {version}, this ckpt reads up to {FORMAT_VERSION}: install a newer ckpt-store"
        )


def _damage_text(where: str) -> str:
    return f"{where} is damaged: it is not what was written; restore the file from a copy, or load another step"


def encode_commit(commit: CommitRecord) -> bytes:
    """The bytes of commit.json."""
    return encode("commit", _commit_body(commit))


def sign_commit(commit: CommitRecord, keys: Keys) -> CommitRecord:
    """The record with the signature of the first key; without keys the record itself."""
    body = {**_commit_body(replace(commit, signature=None)), "kind": "commit", "format": FORMAT_VERSION}
    return replace(commit, signature=keys.sign("commit", _canonical_json(body)))


def decode_commit(data: bytes, where: str, keys: Keys = NO_KEYS) -> CommitRecord:
    """The commit record in `data`. Raises SignatureError where keys are given and none of them signed it."""
    body = decode("commit", data, where)
    commit = parse_body(CommitRecord, body, where)
    try:
        parse_line(commit.line, commit.left)
    except ValueError as error:
        raise IntegrityError(f"{_damage_text(where)} ({error})") from error
    if keys:
        body.pop("signature", None)
        keys.check("commit", _canonical_json(body), commit.signature, where)
    return commit


def _commit_body(commit: CommitRecord) -> dict[str, Any]:
    body = asdict(commit)
    if not commit.line:  # so that a repository without roll-backs has the same records as before there were lines
        del body["line"], body["left"]
    if commit.signature is None:
        del body["signature"]
    return body


def parse_body(kind: type[T], body: dict[str, Any], where: str) -> T:
    """The dataclass `kind` of the content of a record. Raises IntegrityError where a field is missing, or of another type."""
    try:
        return from_data(kind, body)
    except Malformed as error:
        raise IntegrityError(f"{_damage_text(where)} ({error})") from error


def _canonical_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")


def _body_digest(body: dict[str, Any]) -> str:
    return digest("xxh3-128", _canonical_json(body)).hex()
