"""fsspec's own suites, on the namespace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)
from helpers.filesystems import address as address

from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem


class Fixtures(AbstractFixtures):
    @pytest.fixture(scope="class")
    def fs(self, address: str) -> CkptFileSystem:
        return CkptFileSystem(members=address)

    @pytest.fixture
    def fs_path(self, fs: CkptFileSystem) -> Iterator[str]:
        yield "tests"
        fs.namespace.delete(list(fs.namespace.list()))


class TestCopy(AbstractCopyTests, Fixtures):
    pass


class TestGet(AbstractGetTests, Fixtures):
    pass


class TestPut(AbstractPutTests, Fixtures):
    pass


class TestPipe(AbstractPipeTests, Fixtures):
    pass


class TestOpen(AbstractOpenTests, Fixtures):
    pass
