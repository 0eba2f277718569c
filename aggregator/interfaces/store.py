"""A folder of a namespace as a store for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpt.aggregator.file_io.namespace import open_namespace
from ckpt.storage.base.conditional_store import RESERVATION_BYTES, ConditionalStore
from ckpt.storage.base.errors import AlreadyExists, Changed, NotFound
from ckpt.storage.base.store import Buffer, Entry, Reader, Version, Writer, check_name, is_name


class NamespaceStore(ConditionalStore):
    """The store of all files below the path of a ckpt:// URL, with the calls and the errors of `Store`."""

    is_remote = True

    _unused_version: Version = "outdated"

    def __init__(self, url: str) -> None:
        self._namespace, self._root = open_namespace(url)
        self.url = f"{self._namespace.url}/{self._root}".rstrip("/")

    @property
    def device(self) -> str:
        """The namespace."""
        return self._namespace.url

    def put(self, name: str, data: Buffer) -> None:
        self._namespace.put(self._path(name), data)

    def put_new(self, name: str, data: Buffer) -> None:
        try:
            self._namespace.put(self._path(name), data, new=True)
        except AlreadyExists:
            raise AlreadyExists(f"publishing {name} in {self.url}: it exists already") from None

    def _read(self, name: str, limit: int | None = None) -> tuple[bytes, Version]:
        return self._namespace.get_versioned(self._path(name), limit)

    def _compare_and_swap(self, name: str, data: Buffer, expected: Version | None) -> Version | None:
        try:
            return self._namespace.put(self._path(name), data, new=expected is None, replaces=expected).head.version
        except (AlreadyExists, Changed):
            return None

    def exists(self, name: str) -> bool:
        try:
            with self._namespace.open(self._path(name)) as reader:
                return reader.file.head.nbytes != RESERVATION_BYTES or not self._is_reserved(name)
        except NotFound:
            return False

    def open(self, name: str) -> Reader:
        return self._namespace.open(self._path(name))

    def create(self, name: str, size_hint: int = 0) -> Writer:
        return self._namespace.create(self._path(name), None, size_hint)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        skip = len(self._root) + 1 if self._root else 0
        for path, head in self._namespace.list(self._folder(prefix)).items():
            if head.kind == "file" and is_name(path[skip:]):
                yield Entry(path[skip:], head.nbytes)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        base = f"{prefix}/" if prefix else ""
        names = {e.name[len(base) :].partition("/") for e in self.list(prefix)}
        yield from sorted({first for first, slash, _ in names if slash})

    def delete(self, names: Iterable[str]) -> None:
        self._namespace.delete([self._path(name) for name in names])

    def answers(self, seconds: float) -> bool:
        return self._namespace.answers(seconds)

    def _path(self, name: str) -> str:
        check_name(name)
        return f"{self._root}/{name}" if self._root else name

    def _folder(self, prefix: str) -> str:
        return self._path(prefix) if prefix else self._root
