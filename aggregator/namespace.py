"""Many members as one place: files by path, written in pieces to several members and read back from whichever answer."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ckpt.aggregator import files
from ckpt.aggregator.collected import collected_since
from ckpt.aggregator.fanout import FanOut
from ckpt.aggregator.files import INLINE_BYTES, File, Head, Layout
from ckpt.aggregator.ledger import Decide, Keepers, Ledger
from ckpt.aggregator.members import Config, parse_url
from ckpt.aggregator.membership import Membership
from ckpt.aggregator.reading import FileReader
from ckpt.aggregator.redundancy import Redundancy
from ckpt.aggregator.writing import Collected, FileWriter, Forgotten, Gone, new_version
from ckpt.storage.base import Buffer, require_length
from ckpt.storage.device import Info
from ckpt.storage.errors import (
    AlreadyExists,
    Changed,
    CkptError,
    InvalidName,
    NotFound,
    Outdated,
    StoreError,
    Unavailable,
)
from ckpt.storage.failpoints import failpoint
from ckpt.storage.pages import pages
from ckpt.storage.registers import ABSENT, NONE, Answer, Ballot, Damaged, Record, Registers, Value

if TYPE_CHECKING:
    from ckpt.aggregator.collection import Collector

log = logging.getLogger("ckpt")

Scanned = Mapping[str, Sequence[tuple[str, Answer]]]
"""Names and records, by member."""

Outdate = Callable[[bool, int], None]
"""Called with whether a member may have taken a change already, and the fence number that counts by now."""

PATH_BYTES = 1024
TOMBSTONES = 500
"""So many records of deleted files a listing may meet, or as many as there are files, before they are collected."""
_PIECE_BYTES = 8 << 20
_DISCARD_SECONDS = 3.0
_TOLD_SECONDS = 60.0
_SCRATCH_BYTES = 128 << 20
_SCRATCH_LEAST = 256 << 10  # less than this is not worth keeping


def check_path(path: str) -> str:
    """Return `path` if it can name a file: segments joined by '/', none of them empty, '.' or '..'. Raises InvalidName."""
    segments = path.split("/")
    if (
        len(path.encode("utf-8", "replace")) > PATH_BYTES
        or any(s in ("", ".", "..") or len(s.encode("utf-8", "replace")) > 255 for s in segments)
        or any(ord(c) < 32 or c == "\x7f" or 0xD800 <= ord(c) < 0xE000 for c in path)
    ):
        raise InvalidName(
            f"{path[:200]!r} can't name a file: use segments of at most 255 bytes without control characters, joined by '/', "
            f"{PATH_BYTES} bytes in all, and no '.' or '..'"
        )
    return path


class Namespace(Membership):
    """A namespace, opened. Safe to use from many threads."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        seconds = config.access.deadline_seconds
        self.slow_seconds = seconds
        """A member that takes longer for an append is passed over."""
        self.commit_seconds = 4 * seconds
        self.read_seconds = 2 * seconds
        self.hedge_seconds = 0.5
        """A read that takes longer is asked of another member too."""
        self.reads = FanOut(self.fan_out.health)
        self._scratch: list[np.ndarray] = []
        self._scratch_lock = threading.Lock()
        self._ledger = Ledger(self._registers, self._keepers, self.fan_out, seconds, self.renew)
        self._told_few = False
        self._collector: Collector | None = None
        self._told_short = -math.inf
        self._checked: Mapping[str, Info] | None = None

    def _keepers(self, paths: Sequence[str]) -> dict[str, Keepers]:
        now = self.ring
        return {path: now.keepers(path) for path in paths}

    def take_scratch(self, nbytes: int) -> np.ndarray:
        """Memory for fragments, used again and again: as O_DIRECT wants it."""
        if nbytes < _SCRATCH_LEAST:
            return np.empty(nbytes, np.uint8)
        with self._scratch_lock:
            for i, found in enumerate(self._scratch):
                if len(found) == nbytes:
                    return self._scratch.pop(i)
        return np.frombuffer(pages(nbytes), np.uint8)

    def give_scratch(self, found: np.ndarray) -> None:
        """Let memory be used again, which nobody uses any more."""
        if len(found) < _SCRATCH_LEAST:
            return
        with self._scratch_lock:
            self._scratch.append(found)
            while sum(map(len, self._scratch)) > _SCRATCH_BYTES:
                del self._scratch[0]

    # --- records -----------------------------------------------------------------------------------------------

    def stat(self, path: str) -> File | None:
        """What is known of a path; None where there is nothing."""
        return self.stat_all([path])[path]

    def stat_all(self, paths: Sequence[str]) -> dict[str, File | None]:
        """The same of many at once."""
        for path in paths:
            check_path(path)
        if not self.exists():
            return dict.fromkeys(paths)
        found: dict[str, File | None] = {}
        for name, value in self._ledger.read([f"/{path}" for path in paths]).items():
            file = None if value is None else files.decode(name[1:], value)
            found[name[1:]] = file if file is not None and file.exists else None
        return found

    def list(self, folder: str = "") -> dict[str, Head]:
        """The heads of all files and folders below a folder, at any depth, by path, in order.

        Raises Unavailable where so many members are missing that a file could be overlooked.
        """
        prefix = f"/{check_path(folder)}/" if folder else "/"
        if not self.exists():
            return {}
        answers, _ = self.scan(prefix, everyone=False)
        newest: dict[str, tuple[Ballot, bytes, int]] = {}  # and on how many members it is
        for records in answers.values():
            for name, record in records:
                if isinstance(record, Damaged) or record.value is None:
                    continue
                ballot, _, count = newest.get(name, (NONE, b"", 0))
                if ballot < record.accepted:
                    newest[name] = record.accepted, record.value.head, 1
                elif ballot == record.accepted:
                    newest[name] = ballot, record.value.head, count + 1
        found = {name[1:]: files.decode_head(name[1:], head) for name, (_, head, _) in newest.items()}
        self._collect_later(found)
        # What too few have is half-done, or old: it is settled, so that a listing shows what the file says when it is opened.
        needed = self.ring.quorum.write
        for path, file in self.stat_all([name[1:] for name, (_, _, count) in newest.items() if count < needed]).items():
            found.pop(path, None)
            if file is not None:
                found[path] = file.head
        return {path: found[path] for path in sorted(found) if found[path].kind != "deleted"}

    def _collect_later(self, found: Mapping[str, Head]) -> None:
        """Let tombstones be collected in the background where a listing meets too many."""
        deleted = sum(head.kind == "deleted" for head in found.values())
        if deleted > max(TOMBSTONES, len(found) - deleted):
            from ckpt.aggregator.collection import Collector

            if self._collector is None:
                self._collector = Collector(self)
            self._collector.begin()

    def scan(self, prefix: str, everyone: bool = True) -> tuple[Scanned, dict[str, StoreError]]:
        """The records, without bodies, of all names that begin so, by member; and the members that do not answer.

        everyone: whether to wait also for members whose answers can be done without. Raises Unavailable where so many of them
        are missing that a name could be overlooked.
        """
        return self._ledger.lately(partial(self._scan, prefix, everyone))

    def _scan(self, prefix: str, everyone: bool) -> tuple[Scanned, dict[str, StoreError]]:
        now = self.ring

        def read(registers: Registers) -> tuple[list[tuple[str, Answer]], bool]:
            (absent,) = registers.read([ABSENT], now.number)
            return list(registers.scan_all(prefix, now.number)), isinstance(absent, Record)

        calls = {name: partial(read, self._registers[name]) for name in now.everyone}

        def complete(answers: Mapping[str, tuple[object, bool]]) -> bool:
            return now.can_list([name for name, (_, whole) in answers.items() if whole])

        def ask(spare: bool) -> tuple[dict[str, tuple[list[tuple[str, Answer]], bool]], dict[str, StoreError]]:
            will_do = complete if not everyone else lambda _: False
            return self.fan_out.ask(calls, self.commit_seconds, will_do=will_do, spare=spare)

        answers, errors = ask(spare=True)
        if not complete(answers):  # those that did not answer lately are needed after all
            answers, errors = ask(spare=False)
        for error in errors.values():
            if isinstance(error, Outdated):
                raise error
        if not complete(answers):
            reasons = [f"{name}: {error}" for name, error in errors.items()]
            reasons += [f"{n}: its records were lost and are not all back" for n, (_, whole) in answers.items() if not whole]
            raise Unavailable(
                f"{self.url} can't be listed: {len(reasons)} members are missing ({'; '.join(reasons)}); start them"
            )
        return {name: records for name, (records, _) in answers.items()}, errors

    def _ready(self, redundancy: Redundancy) -> None:
        """Before anything is written: know where to, and see to it that its record outlives as many members as its redundancy
        says."""
        self.meet()
        if (infos := self._infos) is not self._checked:
            self.check_devices([spot.name for spot in self.spots])
            self._checked = infos
        if not self.ring.bears(redundancy.tolerated, len(self.spots)):
            from ckpt.aggregator.succession import secure

            secure(self, redundancy)
        if (known := len(self.ring.members)) < 2 * redundancy.tolerated and not self._told_few:
            self._told_few = True
            log.warning(
                "%s has %d members: after the loss of %d the others do not know what there is, though %s keeps the bytes; with "
                "%d members they do", self.url, known, redundancy.tolerated, redundancy, 2 * redundancy.tolerated,
            )  # fmt: skip

    def tell_short(self, path: str, members: int, redundancy: Redundancy) -> None:
        """Say that a file is on fewer members than it should be: now and then, not of each."""
        now = time.monotonic()
        level = logging.WARNING if now >= self._told_short + _TOLD_SECONDS else logging.INFO
        if level == logging.WARNING:
            self._told_short = now
        log.log(
            level, "%s of %s is on %d members where %s asks for %d, as the others take nothing now: `ckpt-node admin repair` "
            "makes it whole when they do, or when there are more", path, self.url, members, redundancy, redundancy.fragments,
        )  # fmt: skip

    def publish(
        self, path: str, file: File, new: bool = False, base: File | None = None, number: int | None = None,
        renewed: Callable[[File], File] = lambda file: file, replaces: str | None = None, unsettled: int | None = None,
    ) -> File:  # fmt: skip
        """Make a record what a path is; what it says then. Raises AlreadyExists if `new` and something is there, Changed if it
        was written on `base`, or is to come in place of version `replaces`, and that is not there any more: for certain. Else
        Unavailable: it may be there, or have been. What a repair has moved meanwhile is the same as before.

        number: the fence number that this client knew before it made, or read of, the objects of the file. renewed: called
        where another number counts by now; it returns the file with objects that exist (`aggregator/eras.py`), or raises.
        unsettled: the fence number by which a member may have taken this version in an earlier try.
        """
        check_path(path)
        old: File | None = None
        given, tried, absent = file, False, False
        number = self.ring.number if number is None else number
        never: int | None = None  # by this number it is known that the path had not this version before

        def outdated(may_be_there: bool, now: int) -> None:
            nonlocal given, number, unsettled
            if may_be_there and unsettled is None:
                unsettled = number
            number = now
            try:
                given = renewed(given)
            except Collected:
                value = self.read_records([f"/{path}"])[f"/{path}"] if unsettled is not None else None
                if not files.had(None if value is None else files.decode(path, value), given.head.version):
                    raise

        def decide(name: str, value: Value | None) -> Value | None:
            nonlocal old, file, tried, absent
            current = None if value is None else files.decode(path, value)
            absent = unsettled is not None and current is None and never != number
            if absent or files.had(current, given.head.version):
                return None  # a quorum is to say what is there; or it is done already, in a try that seemed to fail
            old = current if current is not None and current.exists else None
            if old is not None and (new or old.head.kind != given.head.kind):
                return None
            if replaces is not None and (old is None or old.head.version != replaces):
                return None
            if base is not None and (old is None or old.head.version != base.head.version or not files.same_content(old, base)):
                return None
            file = given
            if base is not None and base.layout and old and old.layout and old.layout != base.layout and given.layout:
                file = replace(given, layout=files.written_on(given.layout, base.layout, old.layout))
            if left := self._forgotten(file):
                raise Forgotten(left, file, base if base is None else old, unsettled)
            shared = file.shared if base is None or current is None else current.shared  # what it is written on
            tried = True
            return files.encode(replace(file, head=files.following(file.head, current), shared=shared))

        value = self.update_by(number, path, decide, outdated, fresh=new)
        while absent and value is None and unsettled is not None:
            if collected_since(self, path, unsettled):
                raise Unavailable(
                    f"{path} in {self.url}: whether it was there, and was deleted since, can't be known; write it anew"
                )
            never = number
            value = self.update_by(number, path, decide, outdated, fresh=new)
        there = None if value is None else files.decode(path, value)
        done = files.had(there, file.head.version) or (tried and files.shares_objects(there, file, base))
        if not done and tried and base is not None and files.forgets(there, base):
            raise Unavailable(
                f"{path} in {self.url} was changed by others again and again: whether this was added in between can't be "
                "known; look at what is there"
            )
        if not done and base is not None:
            raise Changed(f"{path} in {self.url} was changed while it was written on; nothing was added, do it again")
        if not done and replaces is not None:
            raise Changed(f"{path} in {self.url} was changed since it was read; it was not replaced")
        if not done:
            what = there.head.kind if there is not None else "file"
            raise AlreadyExists(f"{path} in {self.url}: a {what} of this name is there already")
        if there is not None and (left := self._forgotten(there)):  # a half-done try, from before, has come through
            self._leave(path, there, left)
        if old is not None and old.layout is not None and not old.shared:
            named = {h.name for each in (file, there) if each and each.layout for h in each.layout.holders}
            self.discard_layout(old.layout, named)
        return there if there is not None and there.head.version == file.head.version else file

    def _forgotten(self, file: File) -> set[str]:
        """Members that hold a part of a file, and were taken out of the namespace."""
        gone = self.ring.gone
        return {h.member for h in file.layout.holders if h.member in gone} if file.layout is not None else set()

    def _leave(self, path: str, file: File, members: Collection[str]) -> None:
        """Move what lies on these members to others, unless somebody else does so, or the path is something else by now."""
        from ckpt.aggregator.repair import newest, replace_layout

        version = file.head.version
        while members:
            assert file.layout is not None
            number = self.ring.number
            gone = Gone(frozenset(h.name for h in file.layout.holders if h.member in members))
            try:
                replace_layout(self, path, file, self.restore(path, version, file.layout, gone), number)
            except CkptError:
                now = newest(self, path, file)
                if now is file:
                    raise
            else:
                return
            if now is None or now.head.version != version:
                return
            file, members = now, self._forgotten(now)

    def delete(self, paths: Iterable[str]) -> Sequence[str]:
        """Remove files and folder marks; the paths that were there. What is not there is no error."""
        every = [check_path(path) for path in paths]
        if not every:
            return []
        old: dict[str, File] = {}
        tried: set[str] = set()
        unsettled = False
        now, version = time.time(), new_version()

        def outdated(may_be_there: bool, _: int) -> None:
            nonlocal unsettled
            unsettled = unsettled or may_be_there

        def decide(name: str, value: Value | None) -> Value | None:
            current = None if value is None else files.decode(name[1:], value)
            if files.had(current, version):
                return None  # done already, in a try that seemed to fail
            old.pop(name[1:], None)  # of a member that did not know the newest
            if current is None or not current.exists:
                return None
            old[name[1:]] = current
            tried.add(name[1:])
            return files.encode(File(files.following(Head("deleted", 0, now, now, version), current)))

        after = self._by(self.ring.number, [f"/{path}" for path in every], decide, outdated)
        # Its tombstone may have been collected by now. Its objects are left to a repair: another client may have deleted it.
        gone = {path for path in tried if unsettled and path not in old and after[f"/{path}"] is None}
        for path in list(old):
            value = after[f"/{path}"]
            if not files.had(None if value is None else files.decode(path, value), version):
                del old[path]  # not by us
        doomed: dict[str, list[str]] = defaultdict(list)
        for file in old.values():
            if file.layout is not None and not file.shared:
                for holder in file.layout.holders:
                    doomed[holder.member].append(holder.name)
        self.discard(doomed)
        return [path for path in every if path in old or path in gone]

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of what was there. Raises NotFound.

        Nothing is copied. A crash in the middle leaves the old name, or both: then a scrub finds out who needs what.
        """
        number = self.ring.number if self.exists() else 0
        file = self.stat(check_path(old))
        if file is None or file.head.kind != "file":
            raise NotFound(f"{old} in {self.url}: {'no such file' if file is None else 'a folder, no file'}")
        if old == new:
            return
        token = new_version()
        if file.layout is not None:
            file = self._shared(old, file.head.version, "", token)
            if file is None:
                raise StoreError(f"{old} in {self.url} was changed while it was renamed; try again")
        mine = file.shared == token  # else others share it already, and only a scrub knows when nobody does
        failpoint("namespace.rename")
        before = file

        def still(moved: File) -> File:
            there = self.stat(old)
            if there is None or (there.head.version, there.shared) != (before.head.version, before.shared):
                raise StoreError(f"{old} in {self.url} was changed while it was renamed; try again")
            return moved

        moved = replace(file, head=replace(file.head, version=new_version(), history=()))
        self.publish(new, moved, number=number, renewed=still)
        failpoint("namespace.renamed")
        gone, version = False, new_version()

        def decide(_: str, value: Value | None) -> Value | None:
            nonlocal gone
            there = None if value is None else files.decode(old, value)
            if files.had(there, version):
                return None
            gone = there is not None and there.head.version == file.head.version and there.shared == file.shared
            if not gone or there is None:
                return None  # changed meanwhile: that stays
            now = time.time()
            return files.encode(File(files.following(Head("deleted", 0, now, now, version), there)))

        after = self.update_record(old, decide)
        ours = after is not None and files.had(files.decode(old, after), version)
        if file.layout is not None and mine and gone and ours:
            self._shared(new, moved.head.version, token, "")

    def _shared(self, path: str, version: str, before: str, after: str) -> File | None:
        """Mark the objects of a file as shared, or not any more; the file as it is then, None where it is another."""

        def decide(_: str, value: Value | None) -> Value | None:
            there = None if value is None else files.decode(path, value)
            if there is None or there.head.version != version or there.shared != before:
                return None
            return files.encode(replace(there, shared=after))

        value = self.update_record(path, decide)
        there = None if value is None else files.decode(path, value)
        return there if there is not None and there.head.version == version else None

    def make_folder(self, path: str) -> None:
        """Mark a folder, so that it is there while it is empty. Raises AlreadyExists."""
        self._ready(self.config.redundancy)
        now = time.time()
        self.publish(path, File(Head("folder", 0, now, now, new_version())), new=True)

    # --- files -------------------------------------------------------------------------------------------------

    def put(
        self, path: str, data: Buffer, new: bool = False, redundancy: Redundancy | None = None, replaces: str | None = None
    ) -> File:
        """Store a whole file, atomically and durably, in place of what was there, or only where nothing was (`new`), or only of
        a version (`replaces`)."""
        view = memoryview(data).cast("B")
        if len(view) <= INLINE_BYTES:
            self._ready(redundancy or self.config.redundancy)
            now = time.time()
            file = File(Head("file", len(view), now, now, new_version()), data=bytes(view))
            return self.publish(path, file, new, replaces=replaces)
        with self.create(path, redundancy, len(view), new=new, aligned=False, replaces=replaces) as writer:
            for start in range(0, len(view), _PIECE_BYTES):
                writer.append(view[start : start + _PIECE_BYTES])
            return writer.publish()

    def empty(self, path: str, there: File) -> File:
        """Let a file be empty, at once; what it is then. Raises Changed if it is another one by now."""
        now = time.time()
        return self.publish(path, File(Head("file", 0, now, now, new_version()), data=b""), base=there)

    def create(
        self, path: str, redundancy: Redundancy | None = None, size_hint: int = 0, *, new: bool = False,
        aligned: bool = True, base: File | None = None, replaces: str | None = None,
    ) -> FileWriter:  # fmt: skip
        """Begin to write a file. base: what is there already and is written on. replaces: the only version that it replaces."""
        redundancy = redundancy or self.config.redundancy
        if base is not None and base.layout is not None:
            redundancy = base.layout.redundancy
        check_path(path)
        self._ready(redundancy)
        return FileWriter(self, path, redundancy, size_hint, new=new, aligned=aligned, base=base, replaces=replaces)

    def open(self, path: str) -> FileReader:
        """Open a file for reading; raises NotFound."""
        file = self.stat(path)
        if self.near:  # for copies that are near
            self.meet(0)
        if file is None or file.head.kind != "file":
            raise NotFound(f"{path} in {self.url}: {'no such file' if file is None else 'a folder, no file'}")
        return FileReader(self, path, file)

    def get(self, path: str) -> bytes:
        """A whole file; the new content where it is replaced meanwhile."""
        return self.get_versioned(path)[0]

    def get_versioned(self, path: str, limit: int | None = None) -> tuple[bytes, str]:
        """A whole file, and its version, for `put`. Raises IntegrityError where it is longer than `limit` bytes."""
        while True:
            with self.open(path) as reader:
                require_length(f"{self.url}/{path}", reader.file.head.nbytes, limit)
                data = bytearray(reader.file.head.nbytes)
                try:
                    reader.read_into(0, memoryview(data))
                    return bytes(data), reader.file.head.version
                except StoreError:
                    there = self.stat(path)
                    if there is not None and there.head.version == reader.file.head.version:
                        raise

    # --- objects that nobody needs -----------------------------------------------------------------------------

    def discard(self, names: Mapping[str, Sequence[str]], patient: bool = False) -> None:
        """Delete objects by member. What can't be deleted now, a scrub finds. patient: wait for nodes that take long, too, and
        that else go on by themselves; for members without a node nobody else does."""
        calls = {m: (lambda m=m, n=n: self.places[m].store.delete(n)) for m, n in names.items() if m in self.places and n}  # type: ignore[misc]
        nodes = {m: call for m, call in calls.items() if self.places[m].member.address is not None and not patient}
        others = {m: call for m, call in calls.items() if m not in nodes}
        errors: dict[str, StoreError] = {}
        for asked, seconds in ((nodes, min(_DISCARD_SECONDS, self.commit_seconds)), (others, self.commit_seconds)):
            errors |= self.fan_out.ask(asked, seconds, spare=True, blame=False)[1] if asked else {}
        for member, error in errors.items():
            log.info("%d objects on %s stay until a scrub: %s", len(names[member]), member, error)

    def discard_layout(self, layout: Layout, kept: Collection[str] = ()) -> None:
        """Delete the objects of a layout but those to keep."""
        doomed: dict[str, list[str]] = defaultdict(list)
        for holder in layout.holders:
            if holder.name not in kept:
                doomed[holder.member].append(holder.name)
        self.discard(doomed)

    def restore(self, path: str, version: str, layout: Layout, gone: Gone, partly: bool = False) -> Layout:
        """The layout with what is gone made anew on other members; see `restoring.restore`."""
        from ckpt.aggregator.restoring import restore

        self.meet()
        return restore(self, path, version, layout, gone, partly=partly)

    # --- for repairs -------------------------------------------------------------------------------------------

    def read_records(self, names: Sequence[str]) -> dict[str, Value | None]:
        """Values by register name, tombstones too."""
        return self._ledger.read(names)

    def update_record(self, path: str, decide: Decide) -> Value | None:
        """Change a record; what it is after that."""
        return self._ledger.update([f"/{path}"], decide)[f"/{path}"]

    def update_by(self, number: int, path: str, decide: Decide, outdated: Outdate, fresh: bool = False) -> Value | None:
        """Change a record by a fence number; what it is after that. outdated: called where another number counts by now; what
        the change refers to must exist after that, or it raises."""
        return self._by(number, [f"/{path}"], decide, outdated, fresh)[f"/{path}"]

    def _by(
        self, number: int, names: Sequence[str], decide: Decide, outdated: Outdate, fresh: bool = False
    ) -> dict[str, Value | None]:
        until = time.monotonic() + 2 * self.commit_seconds
        while True:
            try:
                return self._ledger.update_by(number, names, decide, fresh)
            except Outdated as error:
                if time.monotonic() > until:
                    raise Unavailable(f"{self.url}: {error}; members still change, try again") from error
                self.renew()
                number = self.ring.number
                outdated(error.unsettled, number)

    def office(self, name: str, decide: Decide) -> Value | None:
        """Change a register of the namespace itself, whose name no path has; what it is after that."""
        return self._ledger.update([name], decide)[name]

    def settle(self, names: Sequence[str], everywhere: bool = True) -> None:
        """Give a quorum of the members that keep these registers, or all that answer, the newest value."""
        self._ledger.settle(names, everywhere)

    def close(self) -> None:
        self.fan_out.close()
        self.reads.close()
        for place in self.places.values():
            place.close()


_open: dict[Config, Namespace] = {}
_lock = threading.Lock()


def open_namespace(url: str) -> tuple[Namespace, str]:
    """The namespace of a URL, shared by all who name the same in this process, and the path in it."""
    config, path = parse_url(url)
    with _lock:
        found = _open.get(config)
        if found is None:
            found = _open[config] = Namespace(config)
        return found, path


def _after_fork() -> None:
    """A child makes its own connections."""
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
