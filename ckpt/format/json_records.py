"""The JSON records of a repository, such as the commit record; each has a digest of itself.

A record is canonical JSON (sorted keys, no spaces, ASCII). Its key `digest` is the digest of the record without that key. The
bytes that are read must equal the bytes that would be written, so that any changed byte is found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from ckpt.errors import DAMAGE_ADVICE, FormatError, bad_sectors_as_damage, damage_text
from ckpt.format.codec_choice import CodecChoice
from ckpt.format.difference_choice import DifferenceChoice
from ckpt.format.digest import algorithm_of_hex, digest
from ckpt.format.pack import step_of_file
from ckpt.format.signature import NO_KEYS, Keys, Signature
from ckpt.format.training_lines import Ancestry, TrainingLine, parse_line
from ckpt.storage.base.checked_decode import Malformed, parse_json
from ckpt.storage.base.checked_decode import decode as decode_data
from ckpt.storage.base.errors import IntegrityError
from ckpt.storage.base.store import Store

T = TypeVar("T")

FORMAT_VERSION = 1

MAX_RECORD_BYTES = 64 << 20
"""The most bytes of a record. The commit record of a step with 800,000 packs has about this size."""

MAX_MANIFEST_BYTES = 2 << 30
MAX_TREE_BYTES = 1 << 30
MAX_PART_BYTES = MAX_MANIFEST_BYTES + MAX_TREE_BYTES
"""The most bytes of files of other kinds. A step of ten million arrays stays below. Parsing needs about ten times as much
memory."""


@dataclass(frozen=True, slots=True)
class StepFile:
    """A file of a step: its name below the root of the repository, its length and its digest."""

    name: str
    nbytes: int
    digest: str | None = None
    """32 hexadecimal digits are xxh3-128, 64 are blake3. None for packs, whose blocks have digests in the manifest."""

    def matches(self, data: bytes) -> bool:
        """Return whether `data` has the length and the digest of the file."""
        return len(data) == self.nbytes and digest(algorithm_of_hex(self.digest), data).hex() == self.digest


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The content of commit.json, the record that makes a step exist."""

    step: int
    generation: int
    """The generation of the writer lease under which the step was saved."""
    created: str
    """UTC, ISO 8601."""
    world_size: int
    manifests: tuple[StepFile, ...]
    trees: tuple[StepFile, ...]
    packs: tuple[StepFile, ...]
    """Every pack that the manifests refer to, including packs of earlier steps."""
    leaves: int
    """The number of leaves."""
    raw_bytes: int
    """The bytes of all leaves."""
    written_bytes: int
    """The bytes of the packs that this step added."""
    attempt: int
    """The number of earlier attempts to save this step in this generation."""
    next_save: int | None
    """The step that the ranks of the group save next, if the interval between saves is a time; else None."""
    version: str
    """The version of ckpt that wrote the record."""
    line: int = 0
    """The training line of the step."""
    left: Ancestry = ()
    """The last step of each older line that belongs to the history of this one. See training_lines.py."""
    codec_choices: tuple[CodecChoice, ...] = ()
    """What `codec="auto"` chose on rank 0, and why, for each type of elements; empty if it had nothing to choose."""
    difference_choices: tuple[DifferenceChoice, ...] = ()
    """Whether `auto` stored differences on rank 0, and why, for each type of elements; empty if there was nothing to choose."""
    signature: Signature | None = None
    """The signature of the rest of the record; None if the step was saved without a key."""

    @property
    def training_line(self) -> TrainingLine:
        """The training line of the step."""
        return TrainingLine(self.line, self.left)

    def files(self) -> list[str]:
        """Return the names of all files of the step except the commit record."""
        return [f.name for f in (*self.manifests, *self.trees, *self.packs)]

    @property
    def attempt_name(self) -> str:
        """The name of the attempt of rank 0 that saved the step; "" if the record names no manifest."""
        return self.manifests[0].name.rpartition("/")[2].partition(".")[0] if self.manifests else ""

    @property
    def save_order(self) -> tuple[int, int]:
        """The generation and serial number in the names of the step's files; a later save of the step has a larger pair."""
        serial = self.attempt_name.rpartition("-")[2]
        return self.generation, int(serial) if serial.isdecimal() else 0


def encode(kind: str, body: Mapping[str, object]) -> bytes:
    """Return the bytes of a record of this kind."""
    body = {**body, "kind": kind, "format": FORMAT_VERSION}
    return _canonical_json({**body, "digest": _body_digest(body)})


def decode(kind: str, data: bytes, where: str) -> dict[str, Any]:
    """Return the content of a record.

    where: the file, for messages.

    Raises IntegrityError if a byte was changed or the record is of another kind, and FormatError if a newer version of
    the format wrote it.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise IntegrityError(damage_text(where, f"it has {len(data)} bytes, and a record has at most {MAX_RECORD_BYTES}"))
    try:
        body = parse_json(data)
        claimed = body.pop("digest")
        version = body["format"]
        if _canonical_json({**body, "digest": claimed}) != data or claimed != _body_digest(body):
            raise ValueError("its digest does not match")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(damage_text(where, "it is not what was written")) from error
    require_known_format(version, where)
    if body.get("kind") != kind:
        raise IntegrityError(f"{where} is a {body.get('kind')!r} record, not a {kind!r} record; {DAMAGE_ADVICE}")
    return body  # type: ignore[no-any-return]


def load(store: Store, kind: str, name: str) -> dict[str, Any]:
    """Return the content of a record in a store.

    Raises NotFound, StoreError, IntegrityError for a bad sector, and the errors of `decode`.
    """
    where = f"{store.url}/{name}"
    with bad_sectors_as_damage(where):
        return decode(kind, store.get_up_to(name, MAX_RECORD_BYTES), where)


def require_known_format(version: object, where: str, newest: int = FORMAT_VERSION) -> None:
    """Raise FormatError if a file has a newer format version than this ckpt reads. newest: the newest one of such files."""
    if not isinstance(version, int) or version > newest:
        raise FormatError(f"{where} has format version {version}, this ckpt reads up to {newest}: install a newer ckpt-store")


def encode_commit(commit: CommitRecord) -> bytes:
    """Return the bytes of commit.json."""
    return encode("commit", _commit_body(commit))


def sign_commit(commit: CommitRecord, keys: Keys) -> CommitRecord:
    """Return the record with the signature of the first key; without keys the record itself."""
    body = {**_commit_body(replace(commit, signature=None)), "kind": "commit", "format": FORMAT_VERSION}
    return replace(commit, signature=keys.sign("commit", _canonical_json(body)))


def decode_commit(data: bytes, where: str, keys: Keys = NO_KEYS, step: int | None = None) -> CommitRecord:
    """Return the commit record in `data`.

    step: the step whose record it must be; None for any.

    Raises FormatError as `decode` does, IntegrityError if it is damaged or that of another step, and SignatureError if none of
    `keys` signed it.
    """
    body = decode("commit", data, where)
    commit = parse_body(CommitRecord, body, where)
    try:
        parse_line(commit.line, commit.left)
        for name in commit.files():
            step_of_file(name)  # raises for another name
    except (ValueError, IntegrityError) as error:
        raise IntegrityError(damage_text(where, str(error))) from error
    if step is not None and commit.step != step:
        raise IntegrityError(f"{where} is the record of step {commit.step}; {DAMAGE_ADVICE}")
    if keys:
        body.pop("signature", None)
        keys.check("commit", _canonical_json(body), commit.signature, where)
    return commit


def _commit_body(commit: CommitRecord) -> dict[str, object]:
    body = asdict(commit)
    if not commit.line:  # the format of a record on the first training line has no such fields
        del body["line"], body["left"]
    if not commit.codec_choices:
        del body["codec_choices"]
    if not commit.difference_choices:
        del body["difference_choices"]
    if commit.signature is None:
        del body["signature"]
    return body


def parse_body(kind: type[T], body: Mapping[str, object], where: str) -> T:
    """Return the content of a record as the dataclass `kind`; raise IntegrityError for a field that is missing or ill-typed."""
    try:
        return decode_data(kind, body)
    except Malformed as error:
        raise IntegrityError(damage_text(where, str(error))) from error


def _canonical_json(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")


def _body_digest(body: Mapping[str, object]) -> str:
    return digest("xxh3-128", _canonical_json(body)).hex()
