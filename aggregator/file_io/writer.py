"""The writer of a file: it sends stripes to members that placement proposes, and leaves out those that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from ckpt.aggregator.cluster.fanout import commit_or_abort
from ckpt.aggregator.file_io.lost_fragments import LostFragments
from ckpt.aggregator.file_io.member_choice import MemberChoice
from ckpt.aggregator.file_io.member_io import MemberIO
from ckpt.aggregator.file_io.object_names import new_version, object_name
from ckpt.aggregator.file_io.publication import Condition, Publisher
from ckpt.aggregator.file_io.written_file import WrittenFile
from ckpt.aggregator.placement import erasure
from ckpt.aggregator.placement.redundancy import Redundancy
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import (
    INLINE_FILE_BYTES,
    USUAL_STRIPE_BYTES,
    FileLayout,
    FileRecord,
    Fragment,
    MemberObject,
    RecordHead,
    Stripe,
    fragment_bytes,
)
from ckpt.storage.base.checksums import cell_checksums
from ckpt.storage.base.errors import AlreadyExists, Changed, StoreError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import ALIGNMENT, Writer

_ABORT_SECONDS = 1.0
"""How long a commit waits for members to discard objects without a fragment."""


class FileWriter(Writer):
    """A file that is being written. `append` may be called from several threads; the file exists after `commit`.

    condition: what must be at the path when the file is published; its `base` is the file to append to. size_hint: the expected
    length in bytes. aligned: each append starts at a multiple of 4 KiB.
    """

    def __init__(
        self, member_io: MemberIO, publisher: Publisher, path: str, redundancy: Redundancy, condition: Condition, *,
        size_hint: int = 0, aligned: bool = True,
    ) -> None:  # fmt: skip
        self._member_io = member_io
        self._path = path
        base = condition.base
        self._redundancy = redundancy if base is None or base.layout is None else base.layout.redundancy
        self._alignment = ALIGNMENT if aligned else 1
        self._size_hint = size_hint
        self._version = new_version()
        self._choice = MemberChoice(member_io, path, self._version, self._redundancy)
        self._written_file = WrittenFile(member_io, publisher, path, self._version, condition, self._choice)
        self._lock = threading.Lock()
        """Guards changes of the attributes below while threads append, with two exceptions: an element of `_stripes` is set by
        the one thread whose append has reserved it, and `_append_error` by any thread whose write fails. `publish` takes no
        lock, because it is called after the last append."""
        self._stripes: list[Stripe | None] = []  # None for one that is being written, or whose append failed
        self._next_position = 0
        self._length = 0
        self._inline_data: bytes | None = b""  # the whole content while the file is small
        self._objects: list[MemberObject] = []
        self._writers: list[Writer | None] = []  # one for each object; None for objects of the file to append to
        self._object_by_member: dict[str, int] = {}  # the index of the object that this writer has created on it
        self._opening_locks: dict[str, threading.Lock] = {}  # by member, so that its object is created once
        self._is_finished = False
        self._append_error: StoreError | None = None
        """An error of a write, the first one unless two writes fail at the same moment."""
        if base is not None:
            self._next_position = self._length = base.head.nbytes
            self._inline_data = base.inline_data
        if base is not None and base.layout is not None:
            self._objects = list(base.layout.objects)
            self._writers = [None] * len(self._objects)
            self._stripes = list(base.layout.stripes)

    # --- appending ---------------------------------------------------------------------------------------------

    def append(self, data: memoryview) -> int:
        data = data.cast("B")
        with self._lock:
            if self._is_finished:
                raise self._ended_error()
            start = self._next_position
            self._next_position = -(-(start + len(data)) // self._alignment) * self._alignment
            self._length = start + len(data)
            if self._inline_data is not None and self._length <= INLINE_FILE_BYTES:
                self._inline_data += bytes(start - len(self._inline_data)) + bytes(data)
                return start
            stripes = self._reserve_stripes(start, data)
        self._write_stripes(stripes)
        return start

    def write_at(self, start: int, data: memoryview) -> None:
        """Write a range of the file that was not written yet. Ranges that are never written are zeros. Raises StoreError."""
        data = data.cast("B")
        with self._lock:
            if self._is_finished:
                raise self._ended_error()
            self._next_position = self._length = max(self._length, start + len(data))
            stripes = self._reserve_stripes(start, data)
        self._write_stripes(stripes)

    def truncate(self, length: int) -> None:
        """Set the length of the file in bytes, as the last call before `publish`. Added bytes are zeros. Raises StoreError.

        Stripes beyond a shorter length are cut when the file is published. A write before that makes their bytes visible again.
        """
        stripes: dict[int, tuple[int, memoryview]] = {}
        with self._lock:
            self._length = length
            if self._inline_data is not None:
                self._inline_data = self._inline_data[:length]
                if length <= INLINE_FILE_BYTES:
                    self._inline_data += bytes(length - len(self._inline_data))
                else:
                    stripes = self._reserve_stripes(length, memoryview(b""))
        self._write_stripes(stripes)

    def _reserve_stripes(self, start: int, data: memoryview) -> dict[int, tuple[int, memoryview]]:
        """Reserve stripes for the inline data, which the file has no longer then, and for these bytes. Needs `_lock`.

        Returns the position in the file and the bytes of each stripe, by its index.
        """
        inline_data, self._inline_data = self._inline_data, None
        parts = [(0, memoryview(inline_data or b"")), (start, data)]
        stripes = dict(enumerate((part for part in parts if len(part[1])), len(self._stripes)))
        self._stripes += [None] * len(stripes)
        return stripes

    def _write_stripes(self, stripes: dict[int, tuple[int, memoryview]]) -> None:
        try:
            for index, (start, data) in stripes.items():
                self._write_stripe(index, start, data)
        except StoreError as error:
            self._append_error = self._append_error or error
            raise

    def _write_stripe(self, index: int, start: int, data: memoryview) -> None:
        """Write the fragments of a stripe to as many members. A fragment whose member fails goes to another member."""
        fragment_data, scratch = self._make_fragments(data)
        if self._redundancy.data_fragments == 1:  # all fragments have the same bytes
            sums = [cell_checksums(fragment_data[0])] * len(fragment_data)
        else:
            sums = [cell_checksums(each) for each in fragment_data]
        fragments: list[Fragment | None] = [None] * len(fragment_data)
        unwritten = dict(enumerate(self._choice.choose(index, len(fragment_data), ())))
        while unwritten:
            failpoint("namespace.append")
            calls = {m: self._append_call(m, fragment_data[i]) for i, m in unwritten.items()}
            answers, errors = self._member_io.fan_out.ask(calls, self._member_io.append_timeout_seconds)
            for i, member in list(unwritten.items()):
                if member in answers:
                    object_index, position = answers[member]
                    fragments[i] = Fragment(object_index, position, sums[i])
                    del unwritten[i]
                else:
                    self._choice.mark_failed(member, errors[member])
            if unwritten:
                used = [self._objects[f.object_index].member for f in fragments if f is not None]
                unwritten = dict(zip(unwritten, self._choice.choose(index, len(unwritten), used), strict=False))
        if scratch is not None and not self._choice.has_failures:  # a late append to a failed member may still read it
            self._member_io.scratch.give_back(scratch)
        self._stripes[index] = Stripe(start, len(data), tuple(fragments), len(data))

    def _make_fragments(self, data: memoryview) -> tuple[list[memoryview], np.ndarray | None]:
        """Return the bytes of each fragment of a stripe, and scratch memory to give back when they are written."""
        k, m = self._redundancy.data_fragments, self._redundancy.parity_fragments
        if k == 1:
            return [data] * (1 + m), None
        length = fragment_bytes(len(data), self._redundancy)
        # Data fragments without padding are views of the data. The others and the parity fragments need scratch memory.
        whole = len(data) // length
        scratch = self._member_io.scratch.take((k - whole + m) * length)
        extra = scratch[: (k - whole) * length]
        source = np.frombuffer(data, np.uint8)
        rest = source[whole * length :]
        extra[: len(rest)] = rest
        extra[len(rest) :] = 0
        data_fragments = [source[i * length : (i + 1) * length] for i in range(whole)]
        data_fragments += [extra[i * length : (i + 1) * length] for i in range(k - whole)]
        start = len(extra)
        parity = [scratch[start + i * length : start + (i + 1) * length] for i in range(m)]
        erasure.erasure_code(k, m).encode(data_fragments, parity)
        return [fragment.data for fragment in (*data_fragments, *parity)], scratch

    def _append_call(self, member: str, data: memoryview) -> Callable[[], tuple[int, int]]:
        """Return a call that appends a fragment to the object of a member, and returns the object's index and the position."""

        def append() -> tuple[int, int]:
            index = self._open_object(member)
            writer = self._writers[index]
            assert writer is not None
            return index, writer.append(data)

        return append

    def _open_object(self, member: str) -> int:
        """Return the index of the member's object, which is created when it is first needed."""
        with self._lock:
            opening = self._opening_locks.setdefault(member, threading.Lock())
        with opening:
            if member in self._object_by_member:
                return self._object_by_member[member]
            name = object_name(self._version)
            writer = self._member_io.open_members[member].store.create(name, self._object_size_hint())
            with self._lock:
                if not self._is_finished:
                    self._objects.append(MemberObject(member, name))
                    self._writers.append(writer)
                    self._object_by_member[member] = len(self._objects) - 1
                    return self._object_by_member[member]
        writer.abort()
        raise self._ended_error()

    def _object_size_hint(self) -> int:
        """Return the expected bytes of the object of one member."""
        stripes = max(1, -(-self._size_hint // USUAL_STRIPE_BYTES))
        members = min(len(self._member_io.locations), stripes * self._redundancy.total_fragments)
        return int(self._size_hint * self._redundancy.overhead / members) // ALIGNMENT * ALIGNMENT

    def _ended_error(self) -> StoreError:
        return StoreError(
            f"{self._path} of {self._member_io.url} was published or aborted already; create it again to write it"
        )

    # --- commit ------------------------------------------------------------------------------------------------

    def commit(self) -> int:
        """As `publish`, with the length of the file as the result. Only one of the two is called."""
        self.publish()
        return self._length

    def publish(self) -> FileRecord:
        """Make the file durable and visible, and return its record.

        Raises AlreadyExists or Changed if the condition does not hold: then nothing was published. After Unavailable the
        file may have been published. Raises StoreError if an append failed, or the file was published or aborted already.
        """
        if self._is_finished:
            raise self._ended_error()
        now = time.time()
        head = RecordHead("file", self._length, now, now, self._version)
        if self._inline_data is not None:
            file = FileRecord(head, inline_data=self._inline_data)
        else:
            stripes = tuple(stripe for stripe in self._stripes if stripe is not None)
            if len(stripes) < len(self._stripes):
                raise StoreError(
                    f"{self._path} of {self._member_io.url}: a write failed, so the file can't be published; write it again: "
                    f"{self._append_error}"
                ) from self._append_error
            layout = FileLayout(self._redundancy, tuple(self._objects), file_record.truncate_stripes(stripes, self._length))
            failpoint("namespace.commit")
            lost = LostFragments(frozenset(self._commit_objects()))
            file = FileRecord(head, layout=self._written_file.rebuild_lost(layout, lost))
        failpoint("namespace.record")
        # From now on members may have the record, so an error must not delete the objects. A repair deletes them if no record
        # names them.
        self._is_finished = True
        try:
            file = self._written_file.publish(file)
        except (AlreadyExists, Changed):
            self._is_finished = False  # nothing was published, so `abort` may delete the objects
            raise
        failpoint("namespace.recorded")
        return file

    def _commit_objects(self) -> set[str]:
        """Commit the objects that have fragments, and abort the empty ones; return the names of those that failed."""
        used = {f.object_index for stripe in self._stripes if stripe is not None for f in stripe.fragments if f is not None}
        own_writers = {i: writer for i, writer in enumerate(self._writers) if writer is not None}
        commits = {self._objects[i].member: commit_or_abort(writer) for i, writer in own_writers.items() if i in used}
        _, errors = self._member_io.fan_out.ask(commits, self._member_io.commit_timeout_seconds)
        for member, error in errors.items():
            self._choice.mark_failed(member, error)
        empty = {self._objects[i].member: writer for i, writer in own_writers.items() if i not in used}
        # An empty object on a member that does not answer expires there, or a scrub finds it.
        self._member_io.fan_out.abort(empty, _ABORT_SECONDS)
        return {self._objects[i].name for i in own_writers if self._objects[i].member in errors}

    def abort(self) -> None:
        with self._lock:
            if self._is_finished:
                return
            self._is_finished = True
            own = [(o, writer) for o, writer in zip(self._objects, self._writers, strict=True) if writer is not None]
        self._member_io.abort({member_object.member: writer for member_object, writer in own})
        self._member_io.discard({member_object.member: [member_object.name] for member_object, _ in own})
