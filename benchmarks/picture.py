"""Draws the plot of a run: four panels of bars, with a row for each peer and the limits of the machine as lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import matplotlib
from limits import READ_HOT, WRITE_1, WRITE_BUFFERED
from peers import PEERS
from ratios import best_read, copy_seconds
from report import state_title
from results import PeerResult, Results

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OURS, OTHER, LIMIT, TEXT = "#0b7285", "#c4c9cf", "#c92a2a", "#343a40"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of the plot."""

    title: str
    figure: Callable[[PeerResult], float]
    """Returns the figure of a peer."""
    lines: list[tuple[str, float | None]]
    """The name and value of each limit; None if it was not measured."""
    log: bool = False
    """Whether the axis is logarithmic."""


def panels(results: Results) -> list[Panel]:
    """Return the four panels."""
    read, _ = best_read(results)
    copy = next((copy_seconds(results, peer.nbytes) for peer in results.peers.values()), None)
    return [
        Panel(
            "Durable save, GB/s",
            lambda peer: peer.durable_gbs,
            [("buffered\n+ fsync", results.limit(WRITE_BUFFERED)), ("O_DIRECT\n1 thread", results.limit(WRITE_1))],
        ),
        Panel(
            "Stall of training, ms, log scale: less is better",
            lambda peer: peer.stall_ms,
            [("memory copy\n2 threads", copy and copy * 1e3)],
            log=True,
        ),
        Panel("Load from the disk, GB/s", lambda peer: peer.cold_gbs, [("best disk\nread", read and median(read))]),
        Panel("Load from the page cache, GB/s", lambda peer: peer.hot_gbs, [("page cache\nread", results.limit(READ_HOT))]),
    ]


def draw(results: Results, file: Path) -> None:
    """Write the plot to a PNG file."""
    keys = [key for key in PEERS if key in results.peers]
    if not keys:
        return
    height = 2.2 + 0.62 * len(keys)
    fig, axes = plt.subplots(2, 2, figsize=(12, max(5.0, height)), sharey=True, layout="constrained")
    fig.suptitle(state_title(results), fontsize=13, color=TEXT, x=0.01, ha="left", weight="bold")
    for ax, panel in zip(axes.flat, panels(results), strict=True):
        draw_panel(ax, panel, results, keys)
    axes[0, 0].set_ylim(len(keys) - 0.4, -0.6)
    for ax in axes[:, 0]:
        ax.set_yticks(range(len(keys)), [PEERS[key].title for key in keys])
        for label, key in zip(ax.get_yticklabels(), keys, strict=True):
            label.set(color=OURS if PEERS[key].ours else TEXT, weight="bold" if PEERS[key].ours else "normal")
    fig.supxlabel(f"{results.began} · {results.machine} · medians of {results.repeat}", fontsize=8, color="#868e96")
    fig.savefig(file, dpi=150)
    plt.close(fig)


def draw_panel(ax: Axes, panel: Panel, results: Results, keys: list[str]) -> None:
    """Draw the bars and the limits of one panel. keys: those of the peers, in the order of the rows."""
    values = [panel.figure(results.peers[key]) for key in keys]
    lines = [(name, value) for name, value in panel.lines if value]
    everything = [*values, *(value for _, value in lines)]
    lazy = results.lazy.stall_ms if panel.log and results.lazy and "ckpt-async" in keys else None
    if panel.log:
        ax.set_xscale("log")
        ax.set_xlim(min([*everything, lazy or everything[0]]) / 2.5, max(everything) * 2.5)
    else:
        ax.set_xlim(0, max(everything) * 1.12)

    bars = ax.barh(range(len(keys)), values, height=0.7, color=[OURS if PEERS[key].ours else OTHER for key in keys])
    for bar, value, key in zip(bars, values, keys, strict=True):
        label = f"{value:,.0f}" if panel.log else f"{value:.2f}"
        weight = "bold" if PEERS[key].ours else "normal"
        middle = bar.get_y() + bar.get_height() / 2
        ax.annotate(label, (value, middle), (4, 0), textcoords="offset points", va="center", fontsize=9, color=TEXT,
                    weight=weight, zorder=4, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # fmt: skip
    if lazy is not None:
        row = keys.index("ckpt-async")
        ax.plot(lazy, row, "D", color="white", markeredgecolor=OURS, markersize=6, zorder=5)
        ax.annotate(f"{lazy:.1f} lazy", (lazy, row), (7, 0), textcoords="offset points", va="center", fontsize=8,
                    color="white", weight="bold", zorder=5)  # fmt: skip
    draw_lines(ax, lines)

    ax.set_title(panel.title, fontsize=11, color=TEXT, loc="left", pad=28 if lines else 8)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=8, colors="#868e96")


def draw_lines(ax: Axes, lines: list[tuple[str, float]]) -> None:
    """Draw the limits, with their names above the panel. Two names are placed to the left and right of their lines."""
    ordered = sorted(lines, key=lambda line: line[1])
    sides = ["center"] if len(ordered) == 1 else ["right", "left"]
    for (name, value), side in zip(ordered, sides, strict=True):
        ax.axvline(value, color=LIMIT, linewidth=1.1, linestyle=(0, (4, 3)), zorder=3)
        shift = {"right": 2, "left": -2, "center": 0}[side]
        ax.annotate(name, (value, 1), (shift, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                    ha=side, va="bottom", fontsize=8, color=LIMIT, annotation_clip=False)  # fmt: skip
