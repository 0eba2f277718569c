"""A repository in a local directory whose holder sweeps it, and the files that it has."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.repository.file_names import commit_name
from ckpt.repository.repository import Repository
from ckpt.repository.writer_lease import WriterLease, acquire_lease
from helpers.folders import fast_folder
from helpers.lease_writers import Events, eventful_store
from helpers.written_steps import attempt_files


@pytest.fixture
def events() -> Events:
    """Return what happens before operations of the store."""
    return Events()


@pytest.fixture
def repo(tmp_path: Path, events: Events) -> Iterator[Repository]:
    """Yield a repository that nobody has written."""
    with fast_folder(tmp_path) as folder:
        yield Repository(eventful_store("local", folder / "run", events))


@pytest.fixture
def lease(repo: Repository) -> WriterLease:
    """Return the lease of this process, of generation 1."""
    return acquire_lease(repo)


def files(repo: Repository) -> set[str]:
    """Return the files of all steps."""
    return {entry.name for entry in repo.store.list("steps")}


def files_of(*steps: int) -> set[str]:
    """Return the files of steps that attempt 0-1-0 has committed."""
    return {name for step in steps for name in (commit_name(step), *attempt_files(step, "0-1-0"))}


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings so far."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
