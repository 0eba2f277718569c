"""The test suites of fsspec, on a namespace."""

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
from helpers.folders import fast_folder

from ckpt.aggregator.interfaces.fsspec_filesystem import CkptFileSystem


class Fixtures(AbstractFixtures):
    """The file system under test, and a folder of it that is emptied after each test."""

    @pytest.fixture(scope="class")
    def fs(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CkptFileSystem]:
        with fast_folder(tmp_path_factory.mktemp("disks")) as folder, pytest.MonkeyPatch.context() as patch:
            members = ", ".join(f'{{ url = "{folder}/disk{i}", name = "disk{i}" }}' for i in range(3))
            (folder / "config.toml").write_text(f"[namespaces.disks]\nmembers = [{members}]\n")
            patch.setenv("CKPT_CONFIG", str(folder / "config.toml"))
            yield CkptFileSystem(members="disks")

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
