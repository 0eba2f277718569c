"""What the tuner of `codec="auto"` measures: the store, the codecs, the idle processors, the interval between saves."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.slow_stores import take_for_slow

import ckpt
from ckpt.format.codec_choice import FASTER, CodecChoice
from ckpt.format.json_records import decode_commit, encode, encode_commit
from ckpt.saving.codec_tuner import CodecTuner, SaveConditions, codec_tuner, ranks_on_host
from ckpt.saving.store_speed import StoreSpeed
from ckpt.support.processor_load import ProcessorTimes, parse_processor_times, read_processor_times
from ckpt.support.runtime import processor_count
from ckpt.tools import inspect
from ckpt.tools.codec_choice_display import describe_codec

MIB = 1 << 20


@dataclass
class Clock:
    seconds: float = 100.0
    idle_ticks: int = 0
    total_ticks: int = 0
    processors: int = field(default_factory=processor_count)

    def now(self) -> float:
        return self.seconds

    def times(self) -> ProcessorTimes:
        return ProcessorTimes(self.idle_ticks, self.total_ticks, self.processors)

    def train(self, seconds: float, busy: float) -> None:
        """Let time pass while `busy` processors train."""
        self.seconds += seconds
        self.total_ticks += round(100 * seconds * self.processors)
        self.idle_ticks += round(100 * seconds * (self.processors - busy))


def _write(speed: StoreSpeed, clock: Clock, threads: int, nbytes: int, seconds: float, writers: int = 4) -> None:
    """Let the threads write in eight rounds."""
    for _ in range(8):
        for _ in range(threads):
            speed.write_began()
        clock.seconds += seconds / 8
        for _ in range(threads):
            speed.write_ended(nbytes // (8 * threads), writers)


# --- the store -------------------------------------------------------------------------------------------------


def test_the_speed_of_a_store_is_known_after_some_writing() -> None:
    clock = Clock()
    speed = StoreSpeed(clock.now)
    _write(speed, clock, 4, 100 * MIB, 0.2)
    assert speed.bytes_per_second() is None
    _write(speed, clock, 4, 100 * MIB, 0.2)
    clock.seconds += 50  # no thread writes
    _write(speed, clock, 4, 100 * MIB, 0.2)
    _write(speed, clock, 4, 100 * MIB, 0.2)
    assert speed.bytes_per_second() == pytest.approx(500 * MIB, rel=0.1)


def test_the_first_window_of_a_process_is_not_counted() -> None:
    """There, files are created and memory is mapped for the first time: a fast store would seem slow enough for a codec."""
    clock = Clock()
    speed = StoreSpeed(clock.now)
    _write(speed, clock, 4, 40 * MIB, 0.4)
    assert speed.bytes_per_second() is None
    _write(speed, clock, 4, 400 * MIB, 0.4)
    assert speed.bytes_per_second() == pytest.approx(1000 * MIB, rel=0.3)  # the last appends of the first are in this window


def test_a_store_that_waits_for_encoders_is_not_taken_for_slow() -> None:
    clock = Clock()
    speed = StoreSpeed(clock.now)
    for _ in range(10):
        _write(speed, clock, 4, 400 * MIB, 0.4)
    assert speed.bytes_per_second() == pytest.approx(1000 * MIB, rel=0.1)
    for _ in range(10):  # one thread writes, three encode
        _write(speed, clock, 1, 100 * MIB, 0.4)
    assert speed.bytes_per_second() == pytest.approx(1000 * MIB, rel=0.1)
    for _ in range(10):  # four threads wait for the store: it is slower now
        _write(speed, clock, 4, 100 * MIB, 0.4)
    assert speed.bytes_per_second() == pytest.approx(250 * MIB, rel=0.1)


def test_seconds_until_written_bytes_are_durable_count() -> None:
    clock = Clock()
    tuner = CodecTuner(clock.times, clock.now)
    save = tuner.begin_save(SaveConditions(400 * MIB, 4, True, 1))
    for _ in range(4):
        save.write_began()
    clock.seconds += 0.1
    for _ in range(4):
        save.write_ended(100 * MIB)
    with save.waiting_for_store():
        clock.seconds += 3.9
    assert tuner.store.bytes_per_second() == pytest.approx(100 * MIB)


def test_small_saves_say_nothing_about_the_speed_of_a_store() -> None:
    clock = Clock()
    tuner = CodecTuner(clock.times, clock.now)
    for _ in range(100):
        save = tuner.begin_save(SaveConditions(MIB, 4, True, 1))
        save.write_began()
        clock.seconds += 0.2
        save.write_ended(MIB)
        with save.waiting_for_store():
            clock.seconds += 0.5
        save.end()
    assert tuner.store.bytes_per_second() is None


# --- processors and the interval -------------------------------------------------------------------------------


def _known_store(tuner: CodecTuner, clock: Clock) -> None:
    for _ in range(4):
        _write(tuner.store, clock, 4, 100 * MIB, 1.0)


def test_a_blocking_save_may_use_all_processors() -> None:
    clock = Clock()
    tuner = CodecTuner(clock.times, clock.now)
    conditions = SaveConditions(10**9, 64, True, 1)
    tuner.begin_save(conditions)
    assert tuner.resources(conditions) is None  # the speed of the store is unknown
    _known_store(tuner, clock)
    resources = tuner.resources(conditions)
    assert resources is not None
    assert (resources.encoders, resources.budget_seconds) == (processor_count(), None)


def test_a_background_save_gets_the_processors_that_were_idle_between_saves() -> None:
    clock = Clock(processors=processor_count())
    tuner = CodecTuner(clock.times, clock.now)
    conditions = SaveConditions(10**9, 64, False, 1)
    _known_store(tuner, clock)
    tuner.begin_save(conditions).end()
    first = tuner.resources(conditions)
    assert first is not None
    assert (first.idle_processors, first.budget_seconds) == (0.0, 0.0)  # nothing is known of the training yet
    clock.train(600, busy=0.75)
    tuner.begin_save(conditions).end()
    second = tuner.resources(conditions)
    assert second is not None
    assert second.idle_processors == pytest.approx(processor_count() - 0.75, abs=0.01)
    assert second.budget_seconds == pytest.approx(0.02 * 600 * 0.75, rel=0.01)
    four_ranks = tuner.resources(SaveConditions(10**9, 64, False, 4))
    assert four_ranks is not None
    assert four_ranks.idle_processors == pytest.approx(second.idle_processors / 4)
    assert four_ranks.budget_seconds == pytest.approx(second.budget_seconds / 4)


def test_ranks_of_other_hosts_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (ranks_on_host(1), ranks_on_host(16)) == (1, 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert (ranks_on_host(1), ranks_on_host(16)) == (1, 8)
    for value in ("", "0", "-3", "x"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        assert ranks_on_host(16) in (1, 16)


def test_times_of_linux_are_parsed_and_those_of_others_are_missing() -> None:
    times = parse_processor_times("cpu  100 20 30 400 50 6 7 8 9 10\n", 2)
    assert times == ProcessorTimes(idle=450, total=621, processors=2)
    load = ProcessorTimes(1000, 1821, 2).load_since(times)
    assert load is not None
    assert load.idle == pytest.approx(2 * 550 / 1200)
    assert load.idle + load.busy == pytest.approx(2)
    assert times.load_since(times) is None
    for line in ("", "cpu0 1 2 3 4 5", "cpu a b c d e", "cpu 1 2"):
        with pytest.raises(ValueError, match=r"first line|invalid literal"):
            parse_processor_times(line, 2)
    assert read_processor_times() is None or read_processor_times().processors >= 1


# --- codecs ----------------------------------------------------------------------------------------------------


def _slow_store(clock: Clock) -> CodecTuner:
    tuner = CodecTuner(clock.times, clock.now)
    for _ in range(4):
        _write(tuner.store, clock, 4, 8 * MIB, 1.0)
    return tuner


def test_blocks_choose_the_codec_for_their_type_and_the_choices_are_reported() -> None:
    clock = Clock()
    save = _slow_store(clock).begin_save(SaveConditions(10**9, 4, True, 1))
    weights = np.random.default_rng(0).standard_normal(MIB).astype(np.float32).view(np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, 4 * MIB, np.uint8)
    picked = save.pick("float32", weights, 4)
    assert picked is not None
    assert save.pick("uint8", noise, 1) is None
    first, second = save.choices().codecs
    assert (first.dtype, first.codec, first.reason) == ("float32", picked, FASTER)
    assert first.ratio < 0.9
    assert (second.dtype, second.codec) == ("uint8", None)


def test_averages_follow_the_blocks_and_samples_are_repeated() -> None:
    clock = Clock()
    tuner = _slow_store(clock)
    save = tuner.begin_save(SaveConditions(10**9, 4, True, 1))
    weights = np.random.default_rng(0).standard_normal(MIB).astype(np.float32).view(np.uint8)
    picked = save.pick("float32", weights, 4)

    def note() -> None:
        for _ in range(100):
            save.note_encoded("float32", picked, 1.0, 1e9, 1.0)

    thread = threading.Thread(target=note)  # the main thread is ignored
    thread.start()
    thread.join()
    assert save.pick("float32", weights, 4) != picked  # it did not shrink these blocks
    clock.seconds += 100
    assert save.pick("float32", weights, 4) == picked


def test_a_busy_machine_encodes_on_a_part_of_its_processors() -> None:
    clock = Clock()
    tuner = _slow_store(clock)
    conditions = SaveConditions(10**9, 4, True, 1)
    save = tuner.begin_save(conditions)
    weights = np.random.default_rng(0).standard_normal(MIB).astype(np.float32).view(np.uint8)
    picked = save.pick("float32", weights, 4)
    for share, encoders in ((0.05, 0.2), (1.0, min(4, processor_count()))):

        def note(share: float = share) -> None:
            for _ in range(200):
                save.note_encoded("float32", picked, 0.8, 1e9, share)

        thread = threading.Thread(target=note)
        thread.start()
        thread.join()
        resources = tuner.resources(conditions)
        assert resources is not None
        assert resources.encoders == pytest.approx(encoders, rel=0.01)


def test_folders_of_one_file_system_share_a_tuner(tmp_path: Path) -> None:
    one = codec_tuner(f"file://{tmp_path}/a/b/c")
    assert one is codec_tuner(f"file://{tmp_path}/d")
    assert one is not codec_tuner("file:///proc/1/x")
    assert codec_tuner("s3://bucket/a") is codec_tuner("s3://bucket/b") is not codec_tuner("s3://other/a")


# --- in a save -------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose file system is known as slow, so that a save chooses a codec from its first block on."""
    take_for_slow(tmp_path, monkeypatch, 1e6)
    return tmp_path / "r"


def test_the_commit_record_has_the_choices(slow_repository: Path) -> None:
    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal(MIB, dtype=np.float32), "n": rng.integers(0, 256, MIB, np.uint8), "step": 3}
    checkpoint = ckpt.save(state, slow_repository, step=1)
    choices = {choice.dtype: choice for choice in checkpoint.commit.codec_choices}
    assert choices["float32"].reason == FASTER
    assert checkpoint.commit.written_bytes < 0.95 * checkpoint.commit.raw_bytes
    assert ckpt.open(slow_repository).commit(1) == checkpoint.commit
    printed = CliRunner().invoke(inspect.command, [str(slow_repository), "1"], standalone_mode=False).output
    assert f"auto: {describe_codec(choices['float32'].codec)} for float32: " in printed
    assert "auto: no codec for uint8: " in printed
    loaded = ckpt.load(slow_repository)
    assert all(np.array_equal(loaded[name], state[name]) for name in ("w", "n"))
    assert ckpt.save(state, slow_repository, step=2, codec="none", overwrite=True).commit.codec_choices == ()


def test_records_without_choices_keep_their_bytes_and_unknown_fields_pass(slow_repository: Path) -> None:
    commit = ckpt.save({"w": np.zeros(10)}, slow_repository, step=1, codec="none").commit
    assert b"codec_choices" not in encode_commit(commit)
    choice = CodecChoice("float32", None, "a reason of a newer version", None, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0)
    body = json.loads(encode_commit(commit)) | {"codec_choices": [{**vars_of(choice), "later": 1}]}
    body = {key: value for key, value in body.items() if key not in ("digest", "kind", "format")}
    assert decode_commit(encode("commit", body), "x").codec_choices == (choice,)


def vars_of(choice: CodecChoice) -> dict[str, object]:
    """Return the fields of a choice by name."""
    return {name: getattr(choice, name) for name in CodecChoice.__slots__}
