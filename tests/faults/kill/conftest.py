"""The server that forks the children which the tests of this folder kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.processes import Killer


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    server = Killer()
    yield server
    server.close()
