"""The tables of a run, with the same cells in the terminal and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from peers import PEERS
from ratios import MIB, Ratio, ratios
from results import PeerResult, Results
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WHAT_RUN = "in this run"


@dataclass(slots=True)
class Section:
    """A table, with text in the first column and figures in the others."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    highlighted: set[int] = field(default_factory=set)
    """The indices of the rows of this project."""


def sections(results: Results) -> list[Section]:
    """Return all tables."""
    return [limit_section(results), peer_section(results), ratio_section(results)]


def limit_section(results: Results) -> Section:
    """Return the table of the limits of the machine."""
    section = Section("Limits of this machine", ["limit", "GB/s", "least", "most"])
    for name, samples in results.limits.items():
        section.rows.append([name, *(f"{f(samples):.2f}" for f in (median, min, max))])
    return section


def peer_section(results: Results) -> Section:
    """Return the table of the peers."""
    columns = ["stall ms", "durable GB/s", "cold GB/s", "hot GB/s", "stored", "save +MiB", "load +MiB", "step"]
    section = Section(f"{state_title(results)}, medians of {results.repeat}", ["", *columns])
    for key, peer in PEERS.items():
        if peer.ours:
            section.highlighted.add(len(section.rows))
        if key in results.peers:
            section.rows.append([peer.title, *peer_cells(results.peers[key])])
        elif key in results.missing:
            section.rows.append([peer.title, results.missing[key], *[""] * (len(columns) - 1)])
        else:
            section.highlighted.discard(len(section.rows))
    if results.lazy is not None:
        section.highlighted.add(len(section.rows))
        section.rows.append(["ckpt async, lazy", f"{results.lazy.stall_ms:.1f}", *[""] * (len(columns) - 1)])
    elif "lazy" in results.missing:
        section.rows.append(["ckpt async, lazy", results.missing["lazy"], *[""] * (len(columns) - 1)])
    return section


def peer_cells(peer: PeerResult) -> list[str]:
    """Return the cells of a peer."""
    return [
        f"{peer.stall_ms:.0f}",
        f"{peer.durable_gbs:.2f}",
        f"{peer.cold_gbs:.2f}",
        f"{peer.hot_gbs:.2f}",
        f"{peer.stored_bytes / peer.nbytes:.2f}",
        f"{peer.save_memory_bytes / MIB:.0f}",
        f"{peer.load_memory_bytes / MIB:.0f}",
        "" if peer.step_ratio is None else f"{peer.step_ratio:.2f}",
    ]


def ratio_section(results: Results) -> Section:
    """Return the table of the promised ratios."""
    section = Section("Targets", ["figure", "reached", "target", "", WHAT_RUN])
    for ratio in ratios(results):
        mark = {True: "✓", False: "✗", None: "-"}[ratio.met]
        bound = "≥" if ratio.at_least else "≤"
        section.rows.append([ratio.figure, reached(ratio), f"{bound} {amount(ratio.target, ratio)}", mark, ratio.detail])
    return section


def reached(ratio: Ratio) -> str:
    """Return the reached value as text."""
    return "-" if ratio.reached is None else amount(ratio.reached, ratio)


def amount(value: float, ratio: Ratio) -> str:
    """Return a value with the unit of a ratio as text."""
    return f"{value:.0f} MiB" if ratio.unit == "MiB" else f"{value:.2f} {ratio.unit}".rstrip()


def state_title(results: Results) -> str:
    """Return a description of the saved state."""
    gb = next((f"{peer.gb:.2f} GB" for peer in results.peers.values()), f"{results.gib:g} GiB")
    if results.leaves:
        return f"{results.leaves:,} leaves of 1-64 KiB, {gb}"
    return f"A GPT in bf16 with fp32 master copy and Adam moments, {gb}"


def source(results: Results) -> str:
    """Return the time, the machine and the versions of the run."""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return f"{results.began} on {results.machine}; {versions}"


def show(results: Results, console: Console) -> None:
    """Print all tables. They fit in 100 columns of a terminal, and those with figures alone in 80."""
    for section in sections(results):
        table = Table(title=section.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for number, name in enumerate(section.header):
            text = number == 0 or name == WHAT_RUN
            table.add_column(name.replace(" ", "\n") if not text else name, justify="left" if text else "right")
        for number, row in enumerate(section.rows):
            styled = [row[0], *(MARKS.get(cell, cell) for cell in row[1:])]
            table.add_row(*styled, style="bold cyan" if number in section.highlighted else None)
        console.print(table)
    console.print(source(results), style="dim", highlight=False)


MARKS = {"✓": "[bold green]✓[/]", "✗": "[bold red]✗[/]"}


def markdown(results: Results) -> str:
    """Return all tables as Markdown."""
    lines = [source(results), ""]
    for section in sections(results):
        lines += [f"**{section.title}**", ""]
        lines.append("| " + " | ".join(section.header) + " |")
        lines.append("|" + "|".join(["---", *["---:"] * (len(section.header) - 1)]) + "|")
        for number, row in enumerate(section.rows):
            first = f"**{row[0]}**" if number in section.highlighted else row[0]
            lines.append("| " + " | ".join([first, *row[1:]]) + " |")
        lines.append("")
    return "\n".join(lines)
