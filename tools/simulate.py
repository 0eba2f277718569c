"""The command `ckpt-run simulate`: simulates a training run with failures, to choose the interval between saves."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckpt.storage.base.plural import format_count
from ckpt.tools import common
from ckpt.tools.command_options import gather_options
from ckpt.tools.common import emit

if TYPE_CHECKING:
    from ckpt.recovery.goodput.simulator import IntervalOutcome, World

_Command = TypeVar("_Command", bound=Callable[..., Any] | click.Command)

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def time(text: str) -> float:
    """Return the seconds of a text: a number, which may have a unit, such as 250ms, 30s, 5m, 3h or 2d.

    `--help` shows the name of this function as the type of the options.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) *([a-z]*)", text.strip())
    if not found or found[2] not in _UNITS:
        raise click.BadParameter(f"{text}: write seconds, or a time such as 250ms, 30s, 5m, 3h, 2d")
    return float(found[1]) * _UNITS[found[2]]


def _time_option(flag: str, default: str, text: str) -> Callable[[_Command], _Command]:
    return click.option(flag, type=time, default=default, show_default=True, help=text)


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """The job, its machine and its failures, with all times in seconds. The fields have the names of the options."""

    hosts: int
    ranks: int
    mtbf: float
    step: float
    stall: float
    durable: float
    spawn: float
    restore: float
    repair: float
    spares: int

    def world(self) -> World:
        """Return the parameters of the simulator. Its mean time between failures is that of one host."""
        from ckpt.recovery.goodput.simulator import World

        return World(
            self.hosts, self.ranks, self.mtbf * self.hosts, self.step, self.stall, self.durable, spawn_seconds=self.spawn,
            restore_seconds=self.restore, spares=self.spares, repair_seconds=self.repair,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SimulatedRuns:
    """What is simulated: each interval, for a number of days, once for each seed. Without intervals: those around Daly's."""

    every: tuple[float, ...]
    days: float
    seeds: int


@click.command("ckpt-run simulate", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hosts", type=click.IntRange(1), default=64, show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=8, show_default=True, help="The ranks on each host.")
@_time_option("--mtbf", "3h", "The mean time between failures of the whole job.")
@_time_option("--step", "1s", "The time of a training step.")
@_time_option("--stall", "0.5s", "The time that training waits for a save.")
@_time_option("--durable", "20s", "The time from the end of the stall to the commit.")
@_time_option("--spawn", "10s", "The time in which ranks start and import their modules.")
@_time_option("--restore", "20s", "The time to read a checkpoint.")
@_time_option("--repair", "4h", "The time until a lost host is back.")
@click.option("--spares", type=click.IntRange(0), default=0, show_default=True, help="The hosts that wait as spares.")
@click.option("--every", type=time, multiple=True, help="An interval to try; may be repeated. Default: around Daly's interval.")
@click.option("--days", type=common.Number(0, min_open=True), default=30.0, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=20, show_default=True, help="The simulated runs for each interval.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw goodput by interval into this file.")
@gather_options("job", SimulatedJob)
@gather_options("runs", SimulatedRuns)
def command(job: SimulatedJob, runs: SimulatedRuns, as_json: bool, png: Path | None) -> int:
    """Simulate training with failures and the decisions of ckpt-run, for several intervals between saves.

    \b
      ckpt-run simulate --hosts 512 --mtbf 3h --step 5s --stall 2s
      ckpt-run simulate --mtbf 40m --spares 2 --every 60s --every 10m --png goodput.png
    """
    from ckpt.recovery.goodput.simulator import simulate_intervals

    for name, value in (("--mtbf", job.mtbf), ("--step", job.step), *(("--every", value) for value in runs.every)):
        if value <= 0:
            raise click.UsageError(f"{name}: give a time above 0")
    if png is not None:
        common.require_plot(png)
    points = simulate_intervals(job.world(), runs.days, runs.seeds, runs.every)
    if png is not None:
        from ckpt.tools.run_plots import draw_intervals

        title = f"{format_count(job.hosts, 'host')}, a failure every {job.mtbf / 3600:.3g} h, a save stalls for {job.stall:g} s"
        draw_intervals(points, f"{title}; {runs.days:g} days, {format_count(runs.seeds, 'seed')}", png)
    if as_json:
        common.emit_json([_point_to_json(point) for point in points])
    else:
        _print_points(points, runs)
    return 0


def _point_to_json(point: IntervalOutcome) -> dict[str, object]:
    """Return the result of one interval as JSON. Seconds and counts are means over its runs; `halted` is a number of runs."""
    from ckpt.recovery.goodput.time_category import TIME_CATEGORIES

    outcomes = point.outcomes
    return {
        "interval_seconds": point.interval_seconds,
        "daly": point.daly,
        "goodput": point.goodput,
        "goodputs": point.goodputs,
        "seconds": {name: point.mean(name) * sum(o.wall_seconds for o in outcomes) / len(outcomes) for name in TIME_CATEGORIES},
        "failures": sum(sum(o.failures.values()) for o in outcomes) / len(outcomes),
        "redone_steps": sum(o.redone_steps for o in outcomes) / len(outcomes),
        "halted": sum(bool(o.halt_reason) for o in outcomes),
    }


def _print_points(points: Sequence[IntervalOutcome], runs: SimulatedRuns) -> None:
    """Print a table with a row for each interval."""
    from ckpt.recovery.goodput.time_category import TIME_CATEGORIES

    shown = [name for name in TIME_CATEGORIES if name != "useful" and any(p.mean(name) >= 5e-5 for p in points)]
    rows = [
        (
            _format_duration(p.interval_seconds),
            *(f"{100 * share:.2f}" for share in (p.goodput, min(p.goodputs), max(p.goodputs))),
            *(f"{100 * p.mean(name):.2f}" for name in shown),
            "← Daly" if p.daly else "",
        )
        for p in points
    ]
    common.show_table((">saved every", ">goodput", ">least", ">most", *(f">{name}" for name in shown), ""), rows)
    outcomes = [outcome for p in points for outcome in p.outcomes]
    failures = sum(sum(o.failures.values()) for o in outcomes) / len(outcomes)
    emit(
        f"shares of the time in %; {failures:.0f} failures in {runs.days:g} days, on average of "
        f"{format_count(runs.seeds, 'seed')}"
    )
    if given_up := [outcome for outcome in outcomes if outcome.halt_reason]:
        emit(f"{len(given_up)} of {len(outcomes)} runs were given up: {given_up[0].halt_reason}")


def _format_duration(value: float) -> str:
    return f"{value:.1f} s" if value < 600 else f"{value / 60:.1f} min"
