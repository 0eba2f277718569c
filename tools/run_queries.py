"""What one asks a run under ckpt-run, and tells it: why, status, report, plan, drain, inject."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.plural import format_count
from ckpt.tools import common
from ckpt.tools.common import emit

if TYPE_CHECKING:
    from ckpt.recovery.run_log.agent_reports import AgentReport
    from ckpt.recovery.run_log.base import LogEntry, RunLog
    from ckpt.recovery.run_log.run_state import RunState

SETTINGS = {"help_option_names": ["-h", "--help"]}

folder_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default="ckpt-run-files",
    show_default=True,
    help="Where the run keeps its record and logs.",
)
state_option = click.option("--state", metavar="URL", help="The state of a run on several hosts: etcd://HOST:PORT,…/NAME.")


@click.command("ckpt-run why", context_settings=SETTINGS)
@folder_option
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document a line.")
def why(run_dir: Path, state: str | None, as_json: bool) -> int:
    """Print what was decided, and why."""
    from ckpt.recovery.run_log.base import entry_to_json as lines

    entries = _open_entries(run_dir, state)
    for entry, after in zip_longest(entries, entries[1:]):
        again = entry.kind == "stop" and after is not None and after.kind == "stop"  # with the step that all have agreed on
        if as_json:
            emit(lines(entry))
        elif entry.kind not in ("run", "failure") and not again:
            at = datetime.datetime.fromtimestamp(entry.at).strftime("%H:%M:%S")
            what, where = _describe_facts(entry)
            emit(f"{at}  attempt {entry.attempt}  {entry.kind}  {what}{common.printable(entry.text)}{where}")
    return 0


def _describe_facts(entry: LogEntry) -> tuple[str, str]:
    """What stands before and after the text of an entry."""
    from ckpt.recovery.policy.coordinated_stop import StopRequest
    from ckpt.recovery.run_log.entry_facts import DecisionFacts, facts_of

    if entry.kind == "decision":
        return f"{facts_of(entry, DecisionFacts).action}: ", ""
    if entry.kind == "stop" and (request := facts_of(entry, StopRequest)).agreed:
        return "", f", after step {request.step}"
    return "", ""


@click.command("ckpt-run status", context_settings=SETTINGS)
@folder_option
@state_option
def status(run_dir: Path, state: str | None) -> int:
    """Show what a run does now: its hosts, and the ranks of this one. Exit status: 0 it runs, 1 it does not."""
    from ckpt.recovery.run_log.run_state import RunState

    entries = _open_entries(run_dir, state)
    run_state = RunState().apply_entries(entries)
    reports = _living_agents(run_dir, state)
    if reason := _not_running_reason(run_state, reports):
        emit(common.printable(reason))
        return 1
    spec, last, first = run_state.spec, run_state.last, {member.name: member.first for member in run_state.members}
    assert spec is not None
    assert last is not None
    if len(reports) > 1:
        rows = [
            (r.name, _host_activity(r, run_state), str(first.get(r.name, "")), _format_step(r.step), _format_step(r.committed),
             "coordinates" if r.name == run_state.leader else "")
            for r in sorted(reports.values(), key=lambda r: (first.get(r.name, 1 << 60), r.joined))
        ]  # fmt: skip
        common.show_table(("host", "does", ">first rank", ">step", ">committed", ""), rows)
    at_work = [report for report in reports.values() if _host_activity(report, run_state) in ("running", "over")]
    if not at_work:
        emit(f"no rank runs now; {last.kind}: {common.printable(last.text)}")
    for report in at_work:
        ranks = list(_rank_rows(report))
        if _is_access_denied(report):
            emit(
                f"step {_format_step(report.step)}, committed {_format_step(report.committed)}; only the user of the run "
                "can see its ranks"
            )
        if ranks:
            common.show_table((">rank", ">process", "phase", ">step", ">committed", ">silent for", ">a step"), ranks)
            warm = f"; {report.warm}" if report.warm else ""
            emit(f"attempt {report.attempt}; logs in {report.logs}/{report.attempt}{warm}")
    for report in reports.values():
        if report.held_bytes:
            emit(f"steps take {report.held_bytes / 1e9:.3f} GB of the memory of {common.printable(report.name)}")
    if spec.directory:
        emit(f"checkpoints in {spec.directory}, where the program names no other place")
    if spec.spares:
        emit(f"{sum(name not in first for name in reports)} of {spec.spares} spare hosts wait")
    for text in run_state.stragglers.values():
        emit(common.printable(text))
    return 0


def _not_running_reason(run_state: RunState, reports: Mapping[str, AgentReport]) -> str:
    """Why a run is not under way; "" where it is."""
    if run_state.has_ended and run_state.last is not None:
        return f"it does not run: {run_state.last.text}"
    return "" if reports else "it does not run: its agents are gone; start ckpt-run again, and it goes on"


def _host_activity(report: AgentReport, run_state: RunState) -> str:
    """What a host does; its ranks may be those of an attempt before."""
    if all(member.name != report.name for member in run_state.members):
        return "spare"
    return report.doing if report.doing != "idle" and report.attempt == run_state.attempt else "waits"


def _is_access_denied(report: AgentReport) -> bool:
    """Whether the pages of its ranks are here, and another user's."""
    return Path(report.pages).exists() and not os.access(report.pages, os.R_OK | os.X_OK)


def _rank_rows(report: AgentReport) -> Iterator[tuple[str, ...]]:
    """What the ranks of an agent do, where it is on this host."""
    from ckpt.training.heartbeat_page import HeartbeatPage

    pages, attempt = Path(report.pages), report.attempt
    takes = {pace.rank: f"{1e3 * pace.seconds:.3g} ms" for pace in report.paces}
    numbers = (page.name.removeprefix(f"{attempt}-") for page in pages.glob(f"{attempt}-*"))
    for number in sorted(int(number) for number in numbers if number.isdigit()):
        try:
            beat = HeartbeatPage(pages / f"{attempt}-{number}").read()
        except FileNotFoundError:  # the run has just ended
            continue
        does, silent = ("ended", "") if beat.ended else (beat.phase, f"{time.monotonic() - beat.since:.1f} s")
        yield (
            str(number),
            str(beat.pid or "?"),
            does,
            _format_step(beat.step),
            _format_step(beat.committed),
            silent,
            takes.get(number, ""),
        )


def _living_agents(run_dir: Path, state: str | None) -> dict[str, AgentReport]:
    """The agents that say something while one listens."""
    _require_run(run_dir, state)
    from ckpt.recovery.run_log.agent_reports import find_living_agents
    from ckpt.recovery.run_log.base import open_run_log

    opened = open_run_log(run_dir, state, read_only=True)
    try:
        return find_living_agents(opened)
    finally:
        opened.close()


@click.command("ckpt-run drain", context_settings=SETTINGS)
@folder_option
@state_option
def drain(run_dir: Path, state: str | None) -> int:
    """Let a run save, and end: all ranks after the same step."""
    from ckpt.recovery.run_log.base import Draft, open_run_log
    from ckpt.recovery.run_log.run_state import RunState

    _require_run(run_dir, state)
    opened = open_run_log(run_dir, state)
    while True:
        run_state = RunState().apply_entries(
            _require_entries(opened, run_dir, state)
        )  # as an agent reads them: its token must fit
        if reason := _not_running_reason(run_state, {} if run_state.has_ended else _living_agents(run_dir, state)):
            raise CkptError(reason)
        if opened.append(run_state.number, [Draft(run_state.attempt, "request", "drain", {})]):
            break
    emit(f"it saves and ends; see `ckpt-run status {_run_options(run_dir, state)}`")
    return 0


@click.command("ckpt-run plan", context_settings=SETTINGS)
@folder_option
@state_option
@click.option("--dry-run", is_flag=True, help="Nothing is done in any case.")
@click.option("--lose", multiple=True, metavar="HOST", help="Suppose that this host is lost.")
@click.option("--fail", type=click.IntRange(0), metavar="RANK", help="Suppose that this rank is killed; without both, rank 0.")
def plan(run_dir: Path, state: str | None, dry_run: bool, lose: tuple[str, ...], fail: int | None) -> int:
    """Say what would be decided if something went wrong now, without doing it."""
    from ckpt.recovery.coordinator.dry_run import predict_entries
    from ckpt.recovery.run_log.run_state import RunState

    entries, reports = _open_entries(run_dir, state), _living_agents(run_dir, state)
    run_state = RunState().apply_entries(entries)
    if reason := _not_running_reason(run_state, reports):
        raise CkptError(reason)
    ranks = sum(member.count for member in run_state.members)
    if fail is not None and fail >= ranks:
        raise CkptError(f"there is no rank {fail}; there are {format_count(ranks, 'rank')}, from 0 on")
    for name in lose:
        if name not in reports:
            raise CkptError(f"{name} is no host of this run; there are {', '.join(sorted(reports))}")
    if set(lose) == set(reports):
        raise CkptError("then no host is left that could decide; start ckpt-run again, and it goes on from what was saved")
    if fail is None and not lose:
        fail = 0
    supposed = [f"{name} is lost" for name in lose] + [f"rank {fail} is killed"] * (fail is not None)
    emit(f"suppose  {' and '.join(supposed)}")
    for draft in predict_entries(entries, reports, lose, fail):
        if draft.kind != "failure":  # the decision says what has failed
            emit(f"{draft.kind}  {common.printable(draft.text)}")
    return 0


@click.command("ckpt-run inject", context_settings=SETTINGS)
@click.argument("fault", type=click.Choice(["kill", "stop", "term", "abort"]))
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True)
@folder_option
@state_option
def inject(fault: str, rank: int, run_dir: Path, state: str | None) -> int:
    """Do something bad to a rank of this host, to see what happens: kill it, stop it, end it, let it dump core."""
    from ckpt.training.heartbeat_page import HeartbeatPage

    reports = _living_agents(run_dir, state).values()
    if any(map(_is_access_denied, reports)):
        raise CkptError("this user lacks the permission to signal the ranks: do it as the user of the run")
    pages = [Path(report.pages) / f"{report.attempt}-{rank}" for report in reports]
    page = next((page for page in pages if page.exists()), None)
    if page is None:
        raise CkptError(f"there is no rank {rank} here now: see `ckpt-run status {_run_options(run_dir, state)}`")
    pid = HeartbeatPage(page).read().pid
    if not pid:
        raise CkptError(f"rank {rank} has not opened a Checkpointer yet, so its process is not known")
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "abort": signal.SIGABRT}[fault]
    try:
        os.kill(pid, number)
    except ProcessLookupError as error:
        raise CkptError(f"rank {rank}, process {pid}, has just ended") from error
    emit(f"{number.name} was sent to rank {rank}, process {pid}")
    return 0


@click.command("ckpt-run report", context_settings=SETTINGS)
@folder_option
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--prometheus", is_flag=True, help="Print it in Prometheus' text format.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw it into this file.")
def report(run_dir: Path, state: str | None, as_json: bool, prometheus: bool, png: Path | None) -> int:
    """Print where the time of a run went, or draw it."""
    from ckpt.recovery.goodput.ledger import TIME_CATEGORIES, goodput, read_ledgers, total_seconds_by_category
    from ckpt.recovery.run_log.run_state import is_failure

    entries, seconds = _open_entries(run_dir, state), total_seconds_by_category(run_dir)
    failures = sum(map(is_failure, entries))
    missing_hosts = _hosts_without_ledger(run_dir, entries)
    if state is not None and not seconds:
        whose = " or ".join(missing_hosts) or "ckpt-run"
        raise CkptError(f"{run_dir} holds no ledger of this run; give --run-dir as {whose} had it")
    slow = [entry for entry in entries if entry.kind == "note" and "straggler" in entry.facts]
    total = sum(seconds.values())
    if png is not None:
        common.require_plot(png)
        from ckpt.tools.run_plots import draw_run

        draw_run(read_ledgers(run_dir), entries, png)
    if prometheus:
        from ckpt.recovery.agent.metrics import render_metrics

        emit(render_metrics(entries, seconds, bool(_living_agents(run_dir, state))).rstrip())
    elif as_json:
        common.emit_json({
            "seconds": dict(seconds), "failures": failures, "goodput": goodput(seconds), "not_here": missing_hosts,
            "stragglers": [{"attempt": entry.attempt, **entry.facts} for entry in slow],
        })  # fmt: skip
    else:
        spent = [(name, seconds.get(name, 0.0)) for name in TIME_CATEGORIES]
        rows = [(name, f"{part:.2f} s", f"{100 * part / (total or 1.0):.1f} %") for name, part in spent]
        common.show_table(("", ">seconds", ">share"), rows)
        emit(f"{total:.2f} s in all; {format_count(failures, 'failure')}")
        for entry in slow:
            emit(f"attempt {entry.attempt}: {common.printable(entry.text)}")
    if missing_hosts:
        common.print_error(
            "ckpt-run report",
            f"this is a part of the time only: {', '.join(missing_hosts)} coordinated, too, and accounted in "
            "another --run-dir; bring the ledger-*.jsonl of all into one",
        )
    return 0


def _hosts_without_ledger(run_dir: Path, entries: Sequence[LogEntry]) -> list[str]:
    """The hosts of a run on several that led it, and whose ledgers are not in this folder."""
    from ckpt.recovery.goodput.ledger import ledger_file_name
    from ckpt.recovery.run_log.entry_facts import LeadFacts, RunFacts, facts_of

    hosts = next((facts_of(entry, RunFacts).spec.hosts for entry in reversed(entries) if entry.kind == "run"), 1)
    led = {facts_of(entry, LeadFacts).name for entry in entries if entry.kind == "lead"}
    return sorted(name for name in led if hosts > 1 and not (run_dir / ledger_file_name(name)).exists())


def _format_step(step: int) -> str:
    return str(step) if step >= 0 else "none"


def _require_run(run_dir: Path, state: str | None) -> None:
    """Refuse a folder that holds no run: nothing is made there."""
    from ckpt.recovery.goodput.ledger import ledger_file_name
    from ckpt.recovery.run_log.sqlite import RUN_LOG_FILE

    if state is None and not (run_dir / RUN_LOG_FILE).exists():
        if any(run_dir.glob(ledger_file_name("*"))):
            raise CkptError(f"{run_dir} holds only the ledger of a host; give --state as the run had it")
        raise CkptError(f"{run_dir} holds no run; give its folder as --run-dir")


def _run_options(run_dir: Path, state: str | None) -> str:
    """The options by which a run is found again."""
    return f"--run-dir {run_dir}" if state is None else f"--run-dir {run_dir} --state {state}"


def _open_entries(run_dir: Path, state: str | None) -> list[LogEntry]:
    from ckpt.recovery.run_log.base import open_run_log

    _require_run(run_dir, state)
    opened = open_run_log(run_dir, state, read_only=True)
    entries = _require_entries(opened, run_dir, state)
    opened.close()
    return entries


def _require_entries(opened: RunLog, run_dir: Path, state: str | None) -> list[LogEntry]:
    entries = opened.entries()
    if not entries:
        raise CkptError(f"the run in {state or run_dir} has not begun")
    return entries
