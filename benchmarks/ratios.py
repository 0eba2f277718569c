"""Computes the ratios that this project promises, each within the rounds of one run: figure, reached value, target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from limits import COPY_2, DISK_READS, READ_HOT, WRITE_1
from peers import OTHERS, PEERS
from results import PeerResult, Results

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ratio:
    """One promised ratio. `reached` is None if the run has not measured it."""

    figure: str
    reached: float | None
    at_least: bool
    target: float
    detail: str
    unit: str = ""
    """Empty for a plain ratio."""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None if that is unknown."""
        if self.reached is None:
            return None
        return self.reached >= self.target if self.at_least else self.reached <= self.target


def ratios(results: Results) -> list[Ratio]:
    """Return the ratios for the state of this run: large leaves, or very many small ones."""
    found = small_leaves(results) if results.leaves else large_leaves(results)
    return [*found, *step(results, 1.2 if results.leaves else 1.05), import_time(results)]


def large_leaves(results: Results) -> list[Ratio]:
    ours, background = results.peers.get("ckpt"), results.peers.get("ckpt-async")
    write = (results.limits.get(WRITE_1), "")
    return [
        rate("blocking save / O_DIRECT write, 1 thread", durable(ours), write, 0.85),
        rate("blocking save / best peer", durable(ours), best(results, durable), 1.8),
        rate("async save / O_DIRECT write, 1 thread", durable(background), write, 0.75),
        stall(results),
        lazy_stall(results),
        rate("cold load / best disk read", cold(ours), best_read(results), 0.9),
        rate("cold load / best peer", cold(ours), best(results, cold), 1.0),
        rate("hot load / page cache read", hot(ours), (results.limits.get(READ_HOT), ""), 0.7),
        rate("hot load / best peer", hot(ours), best(results, hot), 1.0),
        memory("memory of a blocking save", ours and ours.save_memory_bytes),
        memory("memory of a load", ours and ours.load_memory_bytes),
        async_memory(background),
    ]


def small_leaves(results: Results) -> list[Ratio]:
    ours = results.peers.get("ckpt")
    return [
        rate("blocking save / best peer", durable(ours), best(results, durable), 2.0),
        rate("cold load / best peer", cold(ours), best(results, cold), 1.0),
        rate("hot load / best peer", hot(ours), best(results, hot), 1.0),
    ]


# --- GB/s of a peer in each round, None if it was not measured -------------------------------------------------

Rates = list[float] | None


def durable(peer: PeerResult | None) -> Rates:
    return peer and [peer.gb / seconds for seconds in peer.durable_seconds]


def cold(peer: PeerResult | None) -> Rates:
    return peer and [peer.gb / seconds for seconds in peer.cold_seconds]


def hot(peer: PeerResult | None) -> Rates:
    return peer and [peer.gb / seconds for seconds in peer.hot_seconds]


Named = tuple[Rates, str]
"""The figure to compare with, in GB/s for each round, and its name."""


def best(results: Results, figure: Callable[[PeerResult | None], Rates]) -> Named:
    """Return the figure of that other peer whose median is the best."""
    rates = [(figure(results.peers[key]), PEERS[key].title) for key in OTHERS if key in results.peers]
    return max(rates, default=(None, ""), key=lambda named: median(named[0] or [0.0]))


def best_read(results: Results) -> Named:
    """Return the limit of disk reads whose median is the best."""
    rates = [(results.limits[name], name.removeprefix("disk read ")) for name in DISK_READS if name in results.limits]
    return max(rates, default=(None, ""), key=lambda named: median(named[0] or [0.0]))


def copy_seconds(results: Results, nbytes: int) -> float | None:
    """Return the seconds of a memory copy of `nbytes` by two threads."""
    rate = results.limit(COPY_2)
    return nbytes / 1e9 / rate if rate else None


# --- the ratios ------------------------------------------------------------------------------------------------


def rate(figure: str, ours: Rates, other: Named, target: float) -> Ratio:
    """Return the ratio of our GB/s to another figure: the median of the ratios of the rounds, with the least and the most."""
    theirs, name = other
    if not ours or not theirs:
        return not_measured(figure, True, target)
    detail = f"{median(ours):.2f} of {median(theirs):.2f} GB/s" + (f", {name}" if name else "")
    if len(ours) != len(theirs):  # of a run whose rounds were not interleaved
        return Ratio(figure, median(ours) / median(theirs), True, target, detail)
    by_round = [our / their for our, their in zip(ours, theirs, strict=True)]
    spread = f"{min(by_round):.2f} to {max(by_round):.2f}; " if len(by_round) > 1 else ""
    return Ratio(figure, median(by_round), True, target, spread + detail)


def stall(results: Results) -> Ratio:
    figure, target = "async stall / copy of the same state, 2 threads", 1.3
    ours = results.peers.get("ckpt-async")
    if not ours:
        return not_measured(figure, False, target)
    return Ratio(figure, ours.stall_ms / ours.copy_ms, False, target, f"{ours.stall_ms:.0f} of {ours.copy_ms:.0f} ms")


def lazy_stall(results: Results) -> Ratio:
    figure, target = "lazy stall / memory copy, 2 threads", 0.05
    lazy = results.lazy
    copy = lazy and copy_seconds(results, lazy.nbytes)
    if not lazy or not copy:
        return not_measured(figure, False, target)
    return Ratio(figure, lazy.stall_ms / 1e3 / copy, False, target, f"{lazy.stall_ms:.1f} of {copy * 1e3:.0f} ms")


def memory(figure: str, nbytes: int | None) -> Ratio:
    if nbytes is None:
        return not_measured(figure, False, 256, "MiB")
    return Ratio(figure, nbytes / MIB, False, 256, "peak above the state", "MiB")


def async_memory(ours: PeerResult | None) -> Ratio:
    figure, target = "memory of an async save / state", 1.05
    if ours is None:
        return not_measured(figure, False, target)
    taken = ours.save_memory_bytes
    return Ratio(figure, taken / ours.nbytes, False, target, f"{taken / MIB:.0f} of {ours.nbytes / MIB:.0f} MiB")


def step(results: Results, target: float) -> list[Ratio]:
    """Return the ratios of a training step during a save to a quiet step, and to a step during a save of torch DCP."""
    figures = "step during a save / quiet step", "step during a save / during torch DCP async"
    ours, dcp = (results.peers[key].step_ratio if key in results.peers else None for key in ("ckpt-async", "dcp-async"))
    if ours is None:
        return [not_measured(figures[0], False, target), not_measured(figures[1], False, 1.0)]
    quiet = Ratio(figures[0], ours, False, target, "one-thread matrix products")
    if dcp is None:
        return [quiet, not_measured(figures[1], False, 1.0)]
    return [quiet, Ratio(figures[1], ours / dcp, False, 1.0, f"{ours:.2f} of {dcp:.2f}")]


def import_time(results: Results) -> Ratio:
    if not results.import_seconds:
        return not_measured("import ckpt", False, 0.3, "s")
    return Ratio("import ckpt", median(results.import_seconds), False, 0.3, "without torch, fresh interpreter", "s")


def not_measured(figure: str, at_least: bool, target: float, unit: str = "") -> Ratio:
    return Ratio(figure, None, at_least, target, "not measured", unit)
