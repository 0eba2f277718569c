"""What all tests begin with, whatever shell or service has started them."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable

import pytest
from helpers.campaigns import CountCases
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Signals as in a terminal. A shell starts its background jobs with SIGINT ignored, nohup does so with SIGHUP, and programs
    that a test starts inherit that: an interrupt would never reach them."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # else each of thousands of processes has a thread per processor
        os.environ.setdefault(name, "1")
    os.environ["CKPT_CACHE_DIR"] = ""  # what was learned of a disk before must not change how a test reads it
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _nothing_known_of_stores() -> None:
    """Without this, `codec="auto"` would compress in some tests, by what it measured of the disk in the tests before."""
    if (module := sys.modules.get("ckpt.saving.codec_tuner")) is not None:
        module._tuners.clear()


@pytest.fixture
def count_cases(record_property: Callable[[str, object], None]) -> CountCases:
    """Record that the test has tried so many cases; see `helpers/campaigns.py`."""
    return lambda count: record_property("cases", count)


@pytest.fixture
def rng() -> random.Random:
    """Another one each time; CKPT_SEED=… repeats what the test has printed."""
    seed = int(os.environ.get("CKPT_SEED") or random.randrange(1 << 32))
    print(f"CKPT_SEED={seed}")
    return random.Random(seed)
