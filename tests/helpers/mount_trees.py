"""The operations of a mount, without a mount, on a namespace of directories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.tools.mount_operations import MountOperations
from helpers.nodes import directories


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Namespace]:
    made = Namespace(directories(tmp_path, 3, redundancy="2x"))
    yield made
    made.close()


@pytest.fixture
def tree(namespace: Namespace) -> MountOperations:
    return MountOperations(namespace, "")
