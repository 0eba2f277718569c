"""Several stores with copies of the same files, as one store that reads from the nearest good copy.

A file never changes after it was written, so its name refers to the same bytes in every store. A store cannot verify bytes. The
reader verifies them, and `from_nearest` calls it with the next copy if one is bad.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from ckpt.errors import DAMAGE_ADVICE
from ckpt.storage.base.errors import IntegrityError, NotFound, StoreError
from ckpt.storage.base.forks import fork_safe_lock
from ckpt.storage.base.store import Buffer, Entry, Reader, Store, Writer

log = logging.getLogger("ckpt")

T = TypeVar("T")


class ReplicatedStore(Store):
    """Several stores as one, the nearest first. The last is the store of record: it provides the URL and takes all writes."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)
        self.url = self.stores[-1].url
        self._lock = threading.Lock()
        """Guards changes of `_listing_failures`."""
        self._listing_failures: dict[str, StoreError] = {}
        """Why stores could not be listed, by URL, since the last call of `take_listing_failures`."""

    # --- reading -----------------------------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        return self._ask_in_order(lambda store: store.get(name))

    def get_up_to(self, name: str, limit: int) -> bytes:
        return self._ask_in_order(lambda store: store.get_up_to(name, limit))

    def open(self, name: str) -> Reader:
        return self._ask_in_order(lambda store: store.open(name))

    def exists(self, name: str) -> bool:
        """Return whether any store has the object.

        Raises StoreError if no store has it and a store failed: that store may have it.
        """
        failure: StoreError | None = None
        for store in self.stores:
            try:
                if store.exists(name):
                    return True
            except StoreError as error:
                failure = error
        if failure is not None:
            raise failure
        return False

    def prefetch(self, name: str, nbytes: int, start: int = 0) -> None:
        for store in self.stores:
            with suppress(StoreError):
                if store.exists(name):
                    store.prefetch(name, nbytes, start)
                    return

    def list(self, prefix: str = "") -> Iterator[Entry]:
        found: dict[str, Entry] = {}
        for entries in self._ask_all(lambda store: [*store.list(prefix)]):
            for entry in entries:
                found.setdefault(entry.name, entry)
        yield from found.values()

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        found = self._ask_all(lambda store: [*store.list_folders(prefix)])
        yield from dict.fromkeys(name for names in found for name in names)

    def _ask_in_order(self, ask: Callable[[Store], T]) -> T:
        """Return the first answer. Raises NotFound only if no store failed: one that could not be read may have the file."""
        failure: StoreError | None = None
        for store in self.stores[:-1]:
            try:
                return ask(store)
            except NotFound:
                continue
            except StoreError as error:
                failure = error
                log.warning("%s; trying the next tier", error)
        try:
            return ask(self.stores[-1])
        except NotFound:
            if failure is not None:
                raise failure from None
            raise

    def _ask_all(self, ask: Callable[[Store], T]) -> Iterator[T]:
        """Yield the result of each store; skip a store that fails, unless it is the last."""
        for store in self.stores:
            try:
                yield ask(store)
            except StoreError as error:
                if store is self.stores[-1]:
                    raise
                log.warning("%s; trying the next tier", error)
                with self._lock:
                    self._listing_failures[store.url] = error

    def take_listing_failures(self) -> dict[str, StoreError]:
        """Return why stores could not be listed since the last call, by URL. What such a store has is missing in a listing."""
        with self._lock:
            failures, self._listing_failures = self._listing_failures, {}
        return failures

    # --- writing -----------------------------------------------------------------------------------------------

    def put(self, name: str, data: Buffer) -> None:
        self.stores[-1].put(name, data)

    def put_new(self, name: str, data: Buffer) -> None:
        self.stores[-1].put_new(name, data)

    def create(self, name: str, size_hint: int = 0) -> Writer:
        return self.stores[-1].create(name, size_hint)

    def delete(self, names: Iterable[str]) -> None:
        self.stores[-1].delete(names)


def copies_of(store: Store) -> tuple[Store, ...]:
    """Return the stores that may have a copy of a file, the nearest first."""
    return store.stores if isinstance(store, ReplicatedStore) else (store,)


def from_nearest(
    store: Store, read: Callable[[Store], T], name: str, position: int = 0, missing: set[tuple[str, str]] | None = None
) -> T:
    """Return the result of `read` for the nearest copy that exists, can be read, and passes its check.

    read: raises IntegrityError if the copy is bad, chained to NotFound if it is missing.
    name, position: the file and the block to read. A copy that was bad before is not read again, unless it is the last.
    missing: (URL, name) of copies that do not exist; the caller keeps it between calls.

    Raises StoreError if no copy is good and a copy could not be read: that copy may be good. Otherwise raises IntegrityError.
    """
    copies = copies_of(store)
    missing = set() if missing is None else missing
    damage: IntegrityError | None = None
    failure: StoreError | None = None
    for copy in copies:
        last = copy is copies[-1]
        if not last and (copy.url, name) in missing:
            continue
        if not last and (name, position) in _bad_blocks.get(copy.url, ()):
            damage = IntegrityError(
                f"{copy.url}/{name} is damaged at byte {position}, as an earlier read found; {DAMAGE_ADVICE}"
            )
            continue
        try:
            return read(copy)
        except IntegrityError as error:
            if isinstance(error.__cause__, NotFound):
                missing.add((copy.url, name))
                damage = damage or error
            else:
                _mark_bad(copy.url, name, position)
                damage = error
                if not last:
                    log.error("bad copy in the tier %s: %s; trying the next tier", copy.url, error)
        except StoreError as error:
            if last:
                raise
            failure = error
            log.warning("%s; trying the next tier", error)
    if failure is not None:
        raise failure
    assert damage is not None  # the last copy is always read
    raise damage


# --- copies that were found bad ----------------------------------------------------------------------------------

_bad_blocks: dict[str, set[tuple[str, int]]] = {}
"""By URL of a store: the file and the position of each block that this process found damaged there."""
_bad_blocks_lock = fork_safe_lock()
"""Guards changes of `_bad_blocks`; `from_nearest` looks up single entries without it."""


def _mark_bad(url: str, name: str, position: int) -> None:
    """Record that a store has a damaged copy of a block."""
    with _bad_blocks_lock:
        _bad_blocks.setdefault(url, set()).add((name, position))


def bad_files(url: str) -> set[str]:
    """Return the files of a store that this process found damaged."""
    with _bad_blocks_lock:
        return {name for name, _ in _bad_blocks.get(url, ())}


def clear_bad(url: str, name: str) -> None:
    """Forget the damage of a file that was written again or deleted."""
    with _bad_blocks_lock:
        _bad_blocks[url] = {(other, position) for other, position in _bad_blocks.get(url, ()) if other != name}


def remove_bad_copies(store: Store, is_intact: Callable[[Store, str], bool]) -> list[str]:
    """Delete bad copies, except in the last store, and return the URLs of those that were deleted.

    Steps of that tier that need a deleted file count as damaged from then on: no later step refers to their blocks, and a load
    does not choose them.

    is_intact: reads a copy and compares it with the digests of all rows that refer to it. A bad copy is deleted only if a store
        after it has an intact one, because the other blocks of the bad copy may be the only good ones.
    """
    removed = []
    copies = copies_of(store)
    for number, copy in enumerate(copies[:-1]):
        for name in bad_files(copy.url):
            length = _file_length(copy, name)
            others = (other for other in copies[number + 1 :] if name not in bad_files(other.url))
            if length is None or any(_file_length(other, name) == length and is_intact(other, name) for other in others):
                if length is not None:
                    copy.delete([name])
                    removed.append(f"{copy.url}/{name}")
                clear_bad(copy.url, name)
    return removed


def _file_length(store: Store, name: str) -> int | None:
    return next((e.nbytes for e in store.list(name.rpartition("/")[0]) if e.name == name), None)
