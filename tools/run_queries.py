"""The subcommands of ckpt-run for an existing run: why, status, report, plan, drain, inject."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.fd_io import describe_os_error
from ckpt.storage.base.plural import format_count
from ckpt.tools import common
from ckpt.tools.common import emit

if TYPE_CHECKING:
    from ckpt.recovery.run_log.agent_reports import AgentReport
    from ckpt.recovery.run_log.base import LogEntry, RunLog
    from ckpt.recovery.run_log.run_state import RunState

HELP_SETTINGS = {"help_option_names": ["-h", "--help"]}

folder_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default="ckpt-run-files",
    show_default=True,
    help="The folder with the log of the run and the output of its ranks.",
)


def _check_state(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the value of --state; raise UsageError if it is not a URL of a run log."""
    if value is not None:
        from ckpt.recovery.run_log.base import require_state_url

        with common.as_usage_errors():
            require_state_url(value)
    return value


state_option = click.option(
    "--state", metavar="URL", callback=_check_state, help="The log of a run on several hosts: etcd://HOST:PORT,…/NAME."
)


@click.command("ckpt-run why", context_settings=HELP_SETTINGS)
@folder_option
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on each line.")
def why(run_dir: Path, state: str | None, as_json: bool) -> int:
    """Print what was decided, and why."""
    from ckpt.recovery.run_log.base import entry_to_json

    entries = _read_entries(run_dir, state)
    for entry, after in zip_longest(entries, entries[1:]):
        is_repeated = entry.kind == "stop" and after is not None and after.kind == "stop"  # the next one has the agreed step
        if as_json:
            emit(entry_to_json(entry))
        elif entry.kind not in ("run", "failure") and not is_repeated:
            at = datetime.datetime.fromtimestamp(entry.at).strftime("%H:%M:%S")
            prefix, suffix = _describe_facts(entry)
            emit(f"{at}  attempt {entry.attempt}  {entry.kind}  {prefix}{common.printable(entry.text)}{suffix}")
    return 0


def _describe_facts(entry: LogEntry) -> tuple[str, str]:
    """Return the texts to print before and after the text of an entry."""
    from ckpt.recovery.policy.coordinated_stop import StopRequest
    from ckpt.recovery.run_log.entry_facts import DecisionFacts, facts_of

    if entry.kind == "decision":
        return f"{facts_of(entry, DecisionFacts).action}: ", ""
    if entry.kind == "stop" and (request := facts_of(entry, StopRequest)).agreed:
        return "", f", after step {request.step}"
    return "", ""


@click.command("ckpt-run status", context_settings=HELP_SETTINGS)
@folder_option
@state_option
def status(run_dir: Path, state: str | None) -> int:
    """Show what a run does now: its hosts, and the ranks of this host. Exit status: 0 it runs, 1 it does not."""
    from ckpt.recovery.run_log.run_state import RunState

    entries = _read_entries(run_dir, state)
    run_state = RunState().apply_entries(entries)
    reports = _living_agents(run_dir, state)
    if reason := _not_running_reason(run_state, reports):
        emit(common.printable(reason))
        return 1
    spec, last, first = run_state.spec, run_state.last, {host.name: host.first for host in run_state.attempt_hosts}
    if len(reports) > 1:
        rows = [
            (r.name, _host_activity(r, run_state), str(first.get(r.name, "")), _format_step(r.step), _format_step(r.committed),
             "leads" if r.name == run_state.leader else "")
            for r in sorted(reports.values(), key=lambda r: (first.get(r.name, 1 << 60), r.joined))
        ]  # fmt: skip
        common.show_table(("host", "does", ">first rank", ">step", ">committed", ""), rows)
    at_work = [report for report in reports.values() if _host_activity(report, run_state) in ("running", "over")]
    if not at_work:
        emit("no rank runs now" + (f"; {last.kind}: {common.printable(last.text)}" if last is not None else ""))
    for report in at_work:
        ranks = list(_rank_rows(report))
        if _is_access_denied(report):
            emit(
                f"step {_format_step(report.step)}, committed {_format_step(report.committed)}; only the user of the run "
                "can see its ranks"
            )
        if ranks:
            common.show_table((">rank", ">process", "phase", ">step", ">committed", ">silent for", ">step time"), ranks)
            warm = f"; {report.warm}" if report.warm else ""
            emit(f"attempt {report.attempt}; logs in {report.logs}/{report.attempt}{warm}")
    for report in reports.values():
        if report.memory_used_bytes:
            emit(f"steps take {report.memory_used_bytes / 1e9:.3f} GB of the memory of {common.printable(report.name)}")
    if spec is not None and spec.directory:  # it is None if the entry that begins the run can't be read
        emit(f"checkpoints in {spec.directory}, where the program names no other place")
    if spec is not None and spec.spares:
        emit(f"{sum(name not in first for name in reports)} of {spec.spares} spare hosts wait")
    for text in run_state.stragglers.values():
        emit(common.printable(text))
    return 0


def _require_running(run_state: RunState, reports: Mapping[str, AgentReport], run_dir: Path, state: str | None) -> None:
    """Raise CkptError with the reason if a run is not running."""
    if reason := _not_running_reason(run_state, reports):
        raise CkptError(f"{reason}; see `ckpt-run why {_run_options(run_dir, state)}`")


def _not_running_reason(run_state: RunState, reports: Mapping[str, AgentReport]) -> str:
    """Return why a run is not running; "" if it is."""
    if run_state.has_ended and run_state.last is not None:
        return f"the run has ended: {run_state.last.text}"
    return "" if reports else "it does not run: its agents are gone; start ckpt-run again to continue it"


def _host_activity(report: AgentReport, run_state: RunState) -> str:
    """Return what a host does. A report may still be of an earlier attempt; then the host waits."""
    if all(host.name != report.name for host in run_state.attempt_hosts):
        return "spare"
    return report.doing if report.doing != "idle" and report.attempt == run_state.attempt else "waits"


def _is_access_denied(report: AgentReport) -> bool:
    """Return whether the heartbeat pages of an agent are on this host, but belong to another user."""
    return Path(report.pages).exists() and not os.access(report.pages, os.R_OK | os.X_OK)


def _rank_rows(report: AgentReport) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each rank of an agent on this host."""
    from ckpt.training.heartbeat_page import HeartbeatPage

    pages, attempt = Path(report.pages), report.attempt
    step_times = {pace.rank: f"{1e3 * pace.seconds:.3g} ms" for pace in report.paces}
    numbers = (page.name.removeprefix(f"{attempt}-") for page in pages.glob(f"{attempt}-*"))
    for number in sorted(int(number) for number in numbers if number.isdigit()):
        try:
            beat = HeartbeatPage(pages / f"{attempt}-{number}").read()
        except FileNotFoundError:  # the run has just ended
            continue
        phase, silent = ("ended", "") if beat.ended else (beat.phase, f"{time.monotonic() - beat.since:.1f} s")
        yield (
            str(number),
            str(beat.pid or "?"),
            phase,
            _format_step(beat.step),
            _format_step(beat.committed),
            silent,
            step_times.get(number, ""),
        )


def _living_agents(run_dir: Path, state: str | None) -> dict[str, AgentReport]:
    """Return the last reports of the agents that publish reports now, by host name. Raises CkptError if there is no run."""
    _require_run(run_dir, state)
    from ckpt.recovery.run_log.agent_reports import find_living_agents
    from ckpt.recovery.run_log.base import open_run_log

    with closing(open_run_log(run_dir, state, read_only=True)) as opened:
        return find_living_agents(opened)


@click.command("ckpt-run drain", context_settings=HELP_SETTINGS)
@folder_option
@state_option
def drain(run_dir: Path, state: str | None) -> int:
    """Let a run save and end: all ranks after the same step."""
    from ckpt.recovery.run_log.base import Draft, open_run_log
    from ckpt.recovery.run_log.run_state import RunState

    _require_run(run_dir, state)
    # Opened as an agent opens it, with the token of the job, which signs the request.
    with closing(open_run_log(run_dir, state)) as opened:
        is_appended = False
        while not is_appended:  # another entry may be appended first
            run_state = RunState().apply_entries(_require_entries(opened, run_dir, state))
            reports = {} if run_state.has_ended else _living_agents(run_dir, state)
            _require_running(run_state, reports, run_dir, state)
            is_appended = opened.append(run_state.number, [Draft(run_state.attempt, "request", "drain", {})])
    emit(f"it saves and ends; see `ckpt-run status {_run_options(run_dir, state)}`")
    return 0


@click.command("ckpt-run plan", context_settings=HELP_SETTINGS)
@folder_option
@state_option
@click.option("--dry-run", is_flag=True, help="Has no effect: this command never changes anything.")
@click.option("--lose", multiple=True, metavar="HOST", help="Suppose that this host is lost.")
@click.option(
    "--fail",
    type=click.IntRange(0),
    metavar="RANK",
    help="Suppose that this rank is killed.  [default: rank 0, without --lose]",
)
def plan(run_dir: Path, state: str | None, dry_run: bool, lose: tuple[str, ...], fail: int | None) -> int:
    """Print what would be decided if something failed now, without doing it."""
    from ckpt.recovery.coordinator.dry_run import predict_entries
    from ckpt.recovery.run_log.run_state import RunState

    entries, reports = _read_entries(run_dir, state), _living_agents(run_dir, state)
    run_state = RunState().apply_entries(entries)
    _require_running(run_state, reports, run_dir, state)
    if run_state.spec is None:
        raise CkptError(f"the entry that begins the run can't be read: see `ckpt-run why {_run_options(run_dir, state)}`")
    ranks = sum(host.count for host in run_state.attempt_hosts)
    if fail is not None and fail >= ranks:
        raise CkptError(f"there is no rank {fail}: the run has {format_count(ranks, 'rank')}, numbered from 0")
    for name in lose:
        if name not in reports:
            raise CkptError(f"{name} is not a host of this run, which has {', '.join(sorted(reports))}")
    if set(lose) == set(reports):
        raise CkptError("without any host nothing is decided until ckpt-run is started again; leave a host out of --lose")
    if fail is None and not lose:
        fail = 0
    supposed = [f"{name} is lost" for name in lose] + [f"rank {fail} is killed"] * (fail is not None)
    emit(f"suppose  {' and '.join(supposed)}")
    for draft in predict_entries(entries, reports, lose, fail):
        if draft.kind != "failure":  # the text of the decision names the failure
            emit(f"{draft.kind}  {common.printable(draft.text)}")
    return 0


@click.command("ckpt-run inject", context_settings=HELP_SETTINGS)
@click.argument("fault", type=click.Choice(["kill", "stop", "term", "abort"]))
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True)
@folder_option
@state_option
def inject(fault: str, rank: int, run_dir: Path, state: str | None) -> int:
    """Make a rank of this host fail, to see what happens: kill it, stop it, terminate it, or let it dump core."""
    from ckpt.recovery.ranks.page_owner import signal_page_owner
    from ckpt.training.heartbeat_page import HeartbeatPage

    reports = _living_agents(run_dir, state).values()
    if any(map(_is_access_denied, reports)):
        raise CkptError("this user may not send signals to the ranks: run the command as the user of the run")
    pages = [Path(report.pages) / f"{report.attempt}-{rank}" for report in reports]
    page = next((page for page in pages if page.exists()), None)
    if page is None:
        raise CkptError(f"rank {rank} does not run on this host now: see `ckpt-run status {_run_options(run_dir, state)}`")
    pid = HeartbeatPage(page).read().pid
    if not pid:
        raise CkptError(f"rank {rank} has not opened a Checkpointer yet, so its process is unknown; try again when it has")
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "abort": signal.SIGABRT}[fault]
    if not signal_page_owner(page, pid, number):
        raise CkptError(f"rank {rank}, process {pid}, has just ended; try again after its restart")
    emit(f"{number.name} was sent to rank {rank}, process {pid}")
    return 0


@click.command("ckpt-run report", context_settings=HELP_SETTINGS)
@folder_option
@state_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--prometheus", is_flag=True, help="Print metrics in the text format of Prometheus.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw a plot into this file.")
def report(run_dir: Path, state: str | None, as_json: bool, prometheus: bool, png: Path | None) -> int:
    """Print how a run spent its time, or draw it."""
    from ckpt.recovery.goodput.ledger import goodput, read_ledgers, seconds_by_category
    from ckpt.recovery.goodput.time_category import TIME_CATEGORIES
    from ckpt.recovery.run_log.run_state import is_failure

    entries = _read_entries(run_dir, state)
    try:
        spans = read_ledgers(run_dir)
    except OSError as error:
        raise CkptError(
            f"the ledger in {run_dir} can't be read: {describe_os_error(error)}; check the folder, or use the user of ckpt-run"
        ) from error
    seconds = seconds_by_category(spans)
    failures = sum(map(is_failure, entries))
    missing_hosts = _hosts_without_ledger(run_dir, entries)
    if state is not None and not seconds:
        owners = " or ".join(missing_hosts) or "ckpt-run"
        raise CkptError(f"{run_dir} has no ledger of this run; give the --run-dir of {owners}")
    slow = [entry for entry in entries if entry.kind == "note" and "straggler" in entry.facts]
    total = sum(seconds.values())
    if png is not None:
        common.require_plot(png)
        from ckpt.tools.run_plots import draw_run

        draw_run(spans, entries, png)
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
            f"this is only a part of the time: {', '.join(missing_hosts)} also coordinated, and the ledgers are in another "
            "--run-dir; copy the ledger-*.jsonl of all hosts into one folder",
        )
    return 0


def _hosts_without_ledger(run_dir: Path, entries: Sequence[LogEntry]) -> list[str]:
    """Return the hosts that have coordinated a run on several hosts, and whose ledgers are not in this folder."""
    from ckpt.recovery.goodput.ledger import ledger_file_name
    from ckpt.recovery.run_log.entry_facts import LeadFacts, RunFacts, facts_of

    hosts = next((facts_of(entry, RunFacts).spec.hosts for entry in reversed(entries) if entry.kind == "run"), 1)
    led = {facts_of(entry, LeadFacts).name for entry in entries if entry.kind == "lead"}
    return sorted(name for name in led if hosts > 1 and not (run_dir / ledger_file_name(name)).exists())


def _format_step(step: int) -> str:
    return str(step) if step >= 0 else "none"


def _require_run(run_dir: Path, state: str | None) -> None:
    """Raise CkptError if there is no run in a folder. Nothing is created."""
    from ckpt.recovery.goodput.ledger import ledger_file_name
    from ckpt.recovery.run_log.sqlite import RUN_LOG_FILE

    if state is None and not (run_dir / RUN_LOG_FILE).exists():
        if any(run_dir.glob(ledger_file_name("*"))):
            raise CkptError(f"{run_dir} has only the ledger of a host; also give the --state of the run")
        raise CkptError(f"there is no run in {run_dir}; give its folder as --run-dir")


def _run_options(run_dir: Path, state: str | None) -> str:
    """Return the options of ckpt-run that name this run."""
    return f"--run-dir {run_dir}" if state is None else f"--run-dir {run_dir} --state {state}"


def _read_entries(run_dir: Path, state: str | None) -> list[LogEntry]:
    """Return the entries of a run, in their order; raise CkptError if there is no run, or it has not begun."""
    from ckpt.recovery.run_log.base import open_run_log

    _require_run(run_dir, state)
    with closing(open_run_log(run_dir, state, read_only=True)) as opened:
        return _require_entries(opened, run_dir, state)


def _require_entries(opened: RunLog, run_dir: Path, state: str | None) -> list[LogEntry]:
    """Return the entries of a run log; raise CkptError if it has none."""
    entries = opened.entries()
    if not entries:
        raise CkptError(f"the run in {state or run_dir} has not begun: check --run-dir and --state")
    return entries
