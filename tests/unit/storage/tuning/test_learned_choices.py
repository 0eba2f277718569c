"""What was learned of devices: kept for the next process, bounded, and safe to lose."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.storage.tuning import learned_choices
from ckpt.storage.tuning.choice import Choice
from ckpt.storage.tuning.device_kinds import DISK

BEST = Choice(4, 1 << 20)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CKPT_CACHE_DIR", str(tmp_path / "cache"))
    learned_choices.forget_tuners()
    yield tmp_path / "cache" / "devices.json"
    learned_choices.forget_tuners()


def learn(device: str, best: Choice = BEST) -> None:
    tuner = learned_choices.shared_tuner(device, DISK)
    tuner._search = replace(tuner.search, best=best, is_resting=True)
    learned_choices.remember(device)


def test_the_next_process_begins_with_what_was_learned(cache: Path) -> None:
    learn("disk 8:0 of here")
    learned_choices.forget_tuners()
    search = learned_choices.shared_tuner("disk 8:0 of here", DISK).search
    assert search.best == BEST
    assert search.is_resting
    assert learned_choices.shared_tuner("disk 8:1 of here", DISK).choice == DISK.first


def test_a_search_that_does_not_rest_yet_is_not_written(cache: Path) -> None:
    learned_choices.shared_tuner("disk", DISK)
    learned_choices.remember("disk")
    assert not cache.exists()


def test_an_unchanged_choice_is_not_written_again(cache: Path) -> None:
    learn("disk")
    cache.unlink()
    learned_choices.remember("disk")
    assert not cache.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]", b'{"version": 2, "devices": {}}', b'{"version": 1}',
        b'{"version": 1, "devices": []}', b'{"version": 1, "devices": {"disk": 5}}',
        b'{"version": 1, "devices": {"disk": {"requests": 4}}}',
        b'{"version": 1, "devices": {"disk": {"requests": [4], "request_bytes": 1048576}}}',
        b'{"version": 1, "devices": {"disk": {"requests": 1e9, "request_bytes": 1048576}}}',
        b'{"version": 1, "devices": {"disk": {"requests": 3, "request_bytes": 1}}}',
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_counts_as_empty_and_is_replaced(cache: Path, content: bytes) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert learned_choices.shared_tuner("disk", DISK).choice == DISK.first
    learn("disk")
    learned_choices.forget_tuners()
    assert learned_choices.shared_tuner("disk", DISK).choice == BEST


def test_entries_with_impossible_times_are_the_first_to_be_dropped(cache: Path) -> None:
    times = {"huge": 10**400, "text": "x", "none": None}
    entries = {name: {"requests": 1, "request_bytes": 1, "learned_at": at} for name, at in times.items()}
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps({"version": 1, "devices": entries}))
    for number in range(100):
        learn(f"disk {number}")
    assert set(json.loads(cache.read_text())["devices"]) == {f"disk {number}" for number in range(100)}


def test_a_folder_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.write_bytes(b"a file")
    learn("disk")
    assert learned_choices.shared_tuner("disk", DISK).choice == BEST


def test_the_file_keeps_the_devices_that_were_learned_last(cache: Path) -> None:
    cache.parent.mkdir()
    entry = {"requests": 4, "request_bytes": 1 << 20}
    devices = {f"old {i}": {**entry, "learned_at": i} for i in range(150)}
    cache.write_text(json.dumps({"version": 1, "devices": devices}))
    learn("new")
    kept = json.loads(cache.read_text())["devices"]
    assert len(kept) == 100
    assert {"new", "old 149"} <= set(kept)
    assert "old 0" not in kept


def test_an_empty_variable_turns_the_file_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_CACHE_DIR", "")
    learn("disk")
    assert learned_choices.cache_folder() is None
    assert not cache.exists()


def test_a_forked_process_does_not_wait_for_requests_of_its_parent() -> None:
    tuner = learned_choices.shared_tuner("disk", DISK)
    with ExitStack() as requests:
        for _ in range(tuner.choice.requests):
            requests.enter_context(tuner.request())
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            with learned_choices.shared_tuner("disk", DISK).request():
                os._exit(0)
        _, status = os.waitpid(child, 0)
    assert status == 0, "the child waited until its alarm"
