"""The class CodecTuner, which measures a store, codecs and idle processors during saves, for the choice of `codec="auto"`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from ckpt.format import codec
from ckpt.format.codec_choice import MAX_STOLEN_SHARE, CodecChoice, CodecSpeed, Resources, choose_codec, reason_against_any
from ckpt.format.difference_choice import AutomaticChoices, DifferenceChoice, choose_differences
from ckpt.saving.difference_speeds import DifferenceMeasurement, DifferenceSpeeds
from ckpt.saving.save_rates import SaveRates, SaveTimer
from ckpt.saving.store_speed import StoreSpeed
from ckpt.state.leaves.base import Bytes
from ckpt.storage.base.forks import call_in_forked_child
from ckpt.storage.base.threads import WorkerThread, join_all
from ckpt.support.processor_load import ProcessorLoad, ProcessorTimes, read_processor_times
from ckpt.support.runtime import processor_count

_CANDIDATES: tuple[dict[str, str | int], ...] = (
    {"id": "float_planes"},
    {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 2, "blocksize": 0},
    {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 1 << 20},
)
_SAMPLE_BYTES = 1 << 20
_SAMPLE_LIFE_SECONDS = 60.0
"""After this time, the codecs that are not in use are measured again, since the data of training change."""

_NEW_WEIGHT = 0.1
"""The weight of one block in the averages of its codec."""


@dataclass(frozen=True, slots=True)
class SaveConditions:
    """What a save knows about itself before it writes."""

    nbytes: int
    """The raw bytes that this rank writes if no block is deduplicated."""
    writers: int
    """The number of threads that encode and write."""
    caller_waits: bool
    ranks_on_host: int


class CodecTuner:
    """Measurements of one store and of the data saved to it, shared by all saves to that store.

    times: returns the processor times of this host, None if the system does not have them.
    clock: returns the seconds of a monotonic clock.
    """

    def __init__(
        self, times: Callable[[], ProcessorTimes | None] = read_processor_times, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        """Guards `_speeds`, `_sampled_at`, `_share`, `_load`, `_last_end`, `_last_begin`, `_interval_seconds`, `_saves_running`
        and `_rates`. It is not held while a block is encoded or written."""
        self._times = times
        self._clock = clock
        self.store = StoreSpeed(clock)
        self.differences = DifferenceSpeeds(clock)
        self._speeds: dict[str, list[CodecSpeed]] = {}
        self._sampled_at: dict[str, float] = {}
        self._share: float | None = None
        """The share of a processor that a thread gets while it encodes: less than 1 where other threads compete for it."""
        self._load: ProcessorLoad | None = None
        self._last_end: ProcessorTimes | None = None
        self._last_begin: float | None = None
        self._interval_seconds: float | None = None
        self._saves_running = 0
        self._rates: dict[bool, SaveRates] = {}
        """By whether the caller waits for the save."""

    def begin_save(self, conditions: SaveConditions) -> SaveCodecs:
        """Return the choices for one save, which must call `end` when it has ended."""
        now, times = self._clock(), self._times()
        with self._lock:
            if not self._saves_running and times is not None and self._last_end is not None:
                self._load = times.load_since(self._last_end) or self._load
            if self._last_begin is not None:
                self._interval_seconds = now - self._last_begin
            self._last_begin = now
            self._saves_running += 1
        against = self.rates(conditions.caller_waits).reason_against()
        could_encode_all = against is None and self.store.bytes_per_second() is not None
        return SaveCodecs(self, conditions, against, SaveTimer(could_encode_all, self._clock))

    def end_save(self, conditions: SaveConditions, timer: SaveTimer | None) -> None:
        """Record that a save has ended: the processors now belong to the training alone. timer: None if the save failed."""
        times = self._times()
        with self._lock:
            self._saves_running -= 1
            self._last_end = times
            if timer is not None:
                rates = self._rates.get(conditions.caller_waits, SaveRates())
                self._rates[conditions.caller_waits] = timer.update(rates)

    def rates(self, caller_waits: bool) -> SaveRates:
        """Return how fast saves were for which the caller waited, or those in the background."""
        with self._lock:
            return self._rates.get(caller_waits, SaveRates())

    def resources(self, conditions: SaveConditions) -> Resources | None:
        """Return what a save can use; None while the speed of the store is unknown."""
        speed = self.store.bytes_per_second()
        if speed is None:
            return None
        processors = processor_count()
        with self._lock:
            load, interval = self._load, self._interval_seconds
            share = 1.0 if self._share is None else self._share
        most = conditions.writers * share
        if conditions.caller_waits:
            return Resources(speed, min(most, processors / conditions.ranks_on_host), processors, None)
        idle, busy = (0.0, 0.0) if load is None else (min(load.idle, processors), load.busy)
        budget = MAX_STOLEN_SHARE * (interval or 0.0) * busy / conditions.ranks_on_host
        encoders = min(most, max(1.0, (processors - 1) / conditions.ranks_on_host))
        return Resources(speed, encoders, idle / conditions.ranks_on_host, budget)

    def speeds(self, dtype: str, raw: Bytes, itemsize: int) -> list[CodecSpeed]:
        """Return the measurements of all candidates on elements of type `dtype`; measure them on `raw` if they are old.

        Empty while another thread measures them for the first time.
        """
        now = self._clock()
        with self._lock:
            known = self._speeds.get(dtype, [])
            if now - self._sampled_at.get(dtype, -_SAMPLE_LIFE_SECONDS) < _SAMPLE_LIFE_SECONDS:
                return known
            self._sampled_at[dtype] = now
        measured, share = _measure_in_thread(raw[:_SAMPLE_BYTES], itemsize)
        with self._lock:
            self._speeds[dtype] = measured
            self._share = share if self._share is None else (self._share + share) / 2
        return measured

    def note_encoded(self, dtype: str, config: str, ratio: float, bytes_per_second: float, share: float) -> None:
        """Take a block that was encoded into the averages of its codec.

        ratio: 1 if it was stored without the codec, because it did not shrink.
        bytes_per_second: by the processor time of the calling thread.
        share: this processor time, divided by the time that passed.
        """
        if _is_main_thread():
            return
        with self._lock:
            self._share = share if self._share is None else self._share + _NEW_WEIGHT * (share - self._share)
            self._speeds[dtype] = [
                s
                if s.config != config
                else CodecSpeed(
                    config,
                    s.ratio + _NEW_WEIGHT * (ratio - s.ratio),
                    s.bytes_per_second + _NEW_WEIGHT * (bytes_per_second - s.bytes_per_second),
                )
                for s in self._speeds.get(dtype, [])
            ]


class SaveCodecs:
    """The choices of one save. Writer threads share it; each entry of its two tables is replaced as a whole."""

    def __init__(self, tuner: CodecTuner, conditions: SaveConditions, against: str | None, timer: SaveTimer) -> None:
        """against: why this save does not encode, whatever is predicted; None if it may."""
        self._tuner = tuner
        self._conditions = conditions
        self._against = against
        self._timer = timer
        self._is_durable = False
        self._choices: dict[str, CodecChoice] = {}
        self._difference_choices: dict[str, DifferenceChoice] = {}

    def pick(self, dtype: str, raw: Bytes, itemsize: int) -> str | None:
        """Return the codec for a block of elements of type `dtype`, None for no codec."""
        resources = self._tuner.resources(self._conditions)
        if resources is None:
            return None
        nbytes = self._conditions.nbytes
        speeds: list[CodecSpeed] = []
        if reason_against_any(nbytes, resources) is None:  # otherwise do not import numcodecs
            speeds = self._tuner.speeds(dtype, raw, itemsize)
            if not speeds:
                return None
        choice = choose_codec(dtype, nbytes, speeds, resources)
        if choice.codec is not None and self._against is not None:
            choice = replace(choice, codec=None, reason=self._against)
        self._choices[dtype] = choice
        return choice.codec

    def note_encoded(self, dtype: str, config: str, ratio: float, bytes_per_second: float, share: float) -> None:
        """As `CodecTuner.note_encoded`."""
        self._tuner.note_encoded(dtype, config, ratio, bytes_per_second, share)

    def try_difference(self, dtype: str) -> bool:
        """Return whether to compute the difference of a block of elements of this type: it pays, or is to be measured.

        Call `pick` before: differences are compared with the codec that it chose.
        """
        choice, resources = self._choices.get(dtype), self._tuner.resources(self._conditions)
        if choice is None or choice.candidate is None or resources is None:  # without a candidate, writing is fast enough
            return False
        speed = self._tuner.differences.speed(dtype)
        if speed is not None:
            in_full = choice.seconds_without if choice.codec is None else choice.seconds
            found = choose_differences(dtype, self._conditions.nbytes, speed, in_full, resources)
            self._difference_choices[dtype] = found
            if found.stores_differences:
                return True
        return not _is_main_thread() and self._tuner.differences.takes_trial(dtype)

    def note_difference(self, dtype: str, measured: DifferenceMeasurement | None) -> None:
        """Take a difference into the averages. measured: None if the block had no base."""
        if measured is None:
            self._tuner.differences.renew_trial(dtype)
        elif not _is_main_thread():
            self._tuner.differences.note(dtype, measured)

    def block_began(self) -> None:
        """Record that a thread begins to encode and write a block."""
        self._timer.began()

    def block_ended(self, nbytes: int, has_encoded: bool | None) -> None:
        """As `SaveTimer.ended`."""
        self._timer.ended(nbytes, has_encoded)

    def write_began(self) -> None:
        """Record that a thread started to write to the store."""
        self._tuner.store.write_began()

    def write_ended(self, nbytes: int) -> None:
        """Record that a thread has written `nbytes` bytes."""
        self._tuner.store.write_ended(nbytes, self._conditions.writers)

    @contextmanager
    def waiting_for_store(self) -> Iterator[None]:
        """While this is open, all writer threads wait until the store has made their bytes durable."""
        threads = self._conditions.writers
        self._tuner.store.write_began(threads)
        self._timer.began()
        try:
            yield
            self._is_durable = True
        finally:
            self._timer.ended()
            self._tuner.store.write_ended(0, threads, threads)

    def choices(self) -> AutomaticChoices:
        """Return the last choices for each type of elements, ordered by the type."""
        return AutomaticChoices(
            tuple(self._choices[dtype] for dtype in sorted(self._choices)),
            tuple(self._difference_choices[dtype] for dtype in sorted(self._difference_choices)),
        )

    def end(self) -> None:
        """Record that the save has ended."""
        self._tuner.end_save(self._conditions, self._timer if self._is_durable else None)


def _is_main_thread() -> bool:
    """Return whether this is the main thread. There, blosc encodes in threads of its own, whose processor time is unknown."""
    return threading.current_thread() is threading.main_thread()


def _measure_in_thread(sample: Bytes, itemsize: int) -> tuple[list[CodecSpeed], float]:
    """Return the measurements of all candidates, and the share of a processor that the thread got.

    In a thread that is not the main one, blosc encodes on one processor.
    """
    measured: list[CodecSpeed] = []
    shares: list[float] = []
    errors: list[BaseException] = []

    def measure() -> None:
        for candidate in _CANDIDATES:
            config = json.dumps(candidate, sort_keys=True)
            codec.encode(config, sample[:4096], itemsize)  # the first call initialises the library, and is not measured
            timer = EncodingTimer()
            encoded = codec.encode(config, sample, itemsize)
            speed, share = timer.stop(len(sample))
            measured.append(CodecSpeed(config, len(encoded) / max(1, len(sample)), speed))
            shares.append(share)

    def run() -> None:
        try:
            measure()
        except BaseException as error:
            errors.append(error)

    thread = WorkerThread(target=run, name="ckpt-measure", daemon=True)
    thread.start()
    join_all([thread], errors.append)  # the sample must not be given back while it is read
    if errors:
        raise errors[0]
    return measured, sum(shares) / max(1, len(shares))


class EncodingTimer:
    """Measures how fast the current thread encodes."""

    def __init__(self) -> None:
        self._began = time.thread_time(), time.perf_counter()

    def stop(self, nbytes: int) -> tuple[float, float]:
        """Return bytes for each second of processor time, and the share of a processor that the thread got."""
        processor, passed = time.thread_time() - self._began[0], time.perf_counter() - self._began[1]
        return nbytes / max(processor, 1e-9), min(1.0, max(processor, 1e-9) / max(passed, 1e-9))


def ranks_on_host(group_size: int) -> int:
    """Return how many ranks save on this host at the same time; the size of the group if no launcher has set it."""
    stated = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun, and others that follow it
    return max(1, min(int(stated), group_size)) if stated.isdecimal() else group_size


_tuners: dict[str, CodecTuner] = {}
"""By file system, or by scheme and host. No lock: `setdefault` gives all threads the same tuner."""

call_in_forked_child(_tuners.clear)  # the threads whose saves they count do not exist in the child


def codec_tuner(store_url: str) -> CodecTuner:
    """Return the tuner of a store. Folders of one file system share one, and so do URLs with the same scheme and host."""
    scheme, _, rest = store_url.partition("://")
    key = f"{scheme}://{rest.partition('/')[0]}"
    if scheme == "file":
        key = f"file system {_device_of(rest)}"
    return _tuners.setdefault(key, CodecTuner())


def _device_of(path: str) -> int:
    """Return the number of the file system of a path, or of its nearest parent that exists."""
    while path:
        with suppress(OSError):
            return os.stat(path).st_dev
        parent = os.path.dirname(path)
        if parent == path:
            break
        path = parent
    return -1
