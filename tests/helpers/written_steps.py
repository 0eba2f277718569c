"""Steps whose files a test writes one by one, as a save would."""

from __future__ import annotations

from ckpt.format.digest import digest
from ckpt.format.json_records import CommitRecord, StepFile, encode_commit, sign_commit
from ckpt.format.signature import NO_KEYS, Keys
from ckpt.format.training_lines import TrainingLine
from ckpt.repository.completeness import note_complete
from ckpt.repository.file_names import commit_name
from ckpt.storage.base.store import Store

FIRST_LINE = TrainingLine()


def attempt_files(step: int, attempt: str) -> tuple[str, str, str]:
    """Return the names of the manifest, the tree and the pack of an attempt, such as "0-1-0"."""
    folder = f"steps/{step}"
    return f"{folder}/manifest/{attempt}.parquet", f"{folder}/manifest/{attempt}.json", f"{folder}/pack/{attempt}-0.pack"


def put_attempt(store: Store, step: int, attempt: str) -> tuple[str, str, str]:
    """Write the files of an attempt that has not committed, and return their names."""
    names = attempt_files(step, attempt)
    for name in names:
        store.put(name, name.encode())
    return names


def commit_of(
    step: int, attempt: str, packs: tuple[StepFile, ...] = (), line: TrainingLine = FIRST_LINE, keys: Keys = NO_KEYS
) -> CommitRecord:
    """Return the record of a step that an attempt may commit, with the files of `put_attempt` and other packs."""
    files = [StepFile(name, len(name), digest("xxh3-128", name.encode()).hex()) for name in attempt_files(step, attempt)]
    record = CommitRecord(
        step, int(attempt.split("-")[1]), "2026-01-01T00:00:00Z", 1, (files[0],), (files[1],), (files[2], *packs),
        0, 0, 0, 0, None, "0.1.0", line.number, line.ancestry,
    )  # fmt: skip
    return sign_commit(record, keys)


def put_step(
    store: Store, step: int, attempt: str = "0-1-0", packs: tuple[StepFile, ...] = (), line: TrainingLine = FIRST_LINE,
    keys: Keys = NO_KEYS,
) -> CommitRecord:  # fmt: skip
    """Write the files of a step, and its commit record. The step counts as complete."""
    put_attempt(store, step, attempt)
    record = commit_of(step, attempt, packs, line, keys)
    note_complete(record)
    store.put(commit_name(step), encode_commit(record))
    return record
