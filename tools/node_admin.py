"""The commands of `ckpt-node admin` for a namespace: status, scrub, repair, drain, rebalance, forget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from ckpt.storage.base.errors import Refused, StoreError
from ckpt.storage.base.plural import format_count
from ckpt.storage.base.store import ByteProgress
from ckpt.tools import common
from ckpt.tools.common import emit, format_size
from ckpt.tools.node_options import NODE_SETTINGS

if TYPE_CHECKING:
    from ckpt.aggregator.file_io.namespace import Namespace
    from ckpt.aggregator.maintenance.repair_report import RepairReport
    from ckpt.aggregator.maintenance.scrub import FileHealth, ScrubReport

_GRACE_OPTION = click.option(
    "--grace", default=3600.0, show_default=True, type=common.Number(0, never=True), metavar="SECONDS",
    help="Keep objects without a record that are younger than this: a client may be writing them.",
)  # fmt: skip
_RATE_OPTION = click.option(
    "--rate", type=common.Size(), metavar="SIZE", help="The most bytes to write per second, such as 200MB."
)


@click.group("admin", context_settings=NODE_SETTINGS)
def admin() -> None:
    """Administer a namespace: ckpt-node admin COMMAND ckpt://…"""


@admin.command("status", context_settings=NODE_SETTINGS)
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status(url: str, as_json: bool) -> int:
    """Show the members of a namespace and whether they answer.

    Exit status: 0 all members answer, 1 some do not.
    """
    from ckpt.aggregator.cluster.member_facts import domain_of_labels
    from ckpt.aggregator.file_io.namespace import open_namespace

    namespace, _ = open_namespace(url)
    calls = {name: open_member.info for name, open_member in namespace.open_members.items()}
    answers, errors = namespace.fan_out.ask(calls, namespace.config.credentials.deadline_seconds)
    domains = {
        n: "/".join(open_member.member.location.domain or domain_of_labels(answers.get(n)))
        for n, open_member in namespace.open_members.items()
    }
    if as_json:
        members = [
            {"member": n, "state": answers[n].state, "used_bytes": answers[n].used_bytes, "free_bytes": answers[n].free_bytes,
             "domain": domains[n]}
            if n in answers else {"member": n, "state": _silent_state(errors[n]), "error": str(errors[n]), "domain": domains[n]}
            for n in namespace.open_members
        ]  # fmt: skip
        common.emit_json({"url": namespace.url, "redundancy": str(namespace.config.redundancy), "members": members})
        return int(bool(errors))
    rows = []
    for name, domain in domains.items():
        if name in answers:
            info = answers[name]
            used, free = ("" if n is None else format_size(n) for n in (info.used_bytes, info.free_bytes))
            rows.append((name, info.state, used, free, domain))
        else:
            rows.append((name, _silent_state(errors[name]), "", "", domain))
    common.show_table(("member", "state", ">used", ">free", "domain"), rows)
    for name, error in errors.items():
        emit(f"{name}: {error}")
    writes = f"; new files are written as {namespace.config.redundancy}" if answers else ""
    emit(f"{len(answers)} of {len(namespace.open_members)} members answer{writes}")
    return int(bool(errors))


def _silent_state(error: BaseException) -> str:
    """Return the state of a member that gave no information: it refused the token or the certificate, or is down."""
    return "refused" if isinstance(error, Refused) else "down"


@admin.command("scrub", context_settings=NODE_SETTINGS)
@click.argument("url")
@click.option("--quick", is_flag=True, help="Compare only lists of objects, and read none of them.")
@_GRACE_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def scrub(url: str, quick: bool, grace: float, as_json: bool) -> int:
    """Let all members read and check their objects, and report missing, damaged and left-over ones. Changes nothing.

    Exit status: 0 there is nothing to repair, 1 there is, or something could not be read, or a member does not answer.
    """
    from ckpt.aggregator.file_io.namespace import open_namespace

    namespace, _ = open_namespace(url)
    found = _run_scrub(namespace, not quick, grace)
    if as_json:
        common.emit_json(
            {
                "url": namespace.url,
                "files": found.files,
                "bytes": found.nbytes,
                "whole": found.is_whole,
                "damaged": [{"path": f.path, "state": f.state, "spare": f.spare_fragments} for f in found.damaged_files],
                "orphans": found.orphans,
                "lagging": found.lagging_paths,
                "unreadable": [*found.unreadable_paths],
                "missing": {m: str(e) for m, e in found.missing_members.items()},
                "unread_bytes": found.unchecked_bytes,
                "exposed": None if found.insufficient_redundancy is None else str(found.insufficient_redundancy),
            }
        )
        return int(not found.is_whole)
    _print_findings(namespace, found)
    return int(not found.is_whole)


@admin.command("repair", context_settings=NODE_SETTINGS)
@click.argument("url")
@click.option("--quick", is_flag=True, help="Repair only what is missing in lists of objects, and read none to find damage.")
@_GRACE_OPTION
@_RATE_OPTION
def repair(url: str, quick: bool, grace: float, rate: int | None) -> int:
    """Repair what a scrub finds, the most endangered files first. It can be interrupted and run again.

    Exit status: 0 nothing is left to repair, 1 something is, or could not be read, or a member does not answer.
    """
    from ckpt.aggregator.file_io.namespace import open_namespace
    from ckpt.aggregator.maintenance.repair import repair_namespace

    namespace, _ = open_namespace(url)
    found = _run_scrub(namespace, not quick, grace)
    _print_findings(namespace, found)
    total = sum(f.file.head.nbytes for f in found.damaged_files if f.state != "lost")
    with common.progress(total, "repairing") as advance:
        done = repair_namespace(namespace, found, rate, advance)
    is_incomplete = bool(done.failed or found.missing_members or found.unchecked_bytes)
    result = "not all whole yet" if is_incomplete else "nothing is missing now" if quick else "all whole now"
    emit(
        f"{format_count(done.files, 'file')} made whole ({format_size(done.nbytes)} written), "
        f"{format_count(done.records, 'record')} brought up to date, "
        f"{format_count(done.orphans, 'unreferenced object')} deleted; {result}"
    )
    for path, reason in done.failed.items():
        if path not in found.unreadable_paths:  # else the findings have it
            emit(f"{path}: {reason}")
    return int(is_incomplete)


@admin.command("drain", context_settings=NODE_SETTINGS)
@click.argument("url")
@click.argument("member")
@_RATE_OPTION
def drain(url: str, member: str, rate: int | None) -> int:
    """Move all data of MEMBER to the others, before its disk is removed. Give it the weight 0 in the TOML file first.

    It still keeps records: use `forget` before it is removed for good.
    """
    from ckpt.aggregator.file_io.namespace import open_namespace
    from ckpt.aggregator.maintenance import rebalance

    namespace, _ = open_namespace(url)
    with common.progress(_member_used_bytes(namespace, member), "moving") as advance:
        status = _print_moved(rebalance.drain_member(namespace, member, _limit_rate(advance, rate)))
    if any(location.name == member and location.weight > 0 for location in namespace.locations):
        emit(f"new files still go to {member}: give it the weight 0 in the TOML file and drain it again, or `forget` it")
    return status


@admin.command("rebalance", context_settings=NODE_SETTINGS)
@click.argument("url")
@_RATE_OPTION
def rebalance(url: str, rate: int | None) -> int:
    """Move files to where they would be written today, such as to new members. New members also keep records afterwards."""
    from ckpt.aggregator.file_io.namespace import open_namespace
    from ckpt.aggregator.maintenance import rebalance

    namespace, _ = open_namespace(url)
    with common.growing_progress("moving") as (expect, advance):
        return _print_moved(rebalance.rebalance_fragments(namespace, _limit_rate(advance, rate), expect))


@admin.command("forget", context_settings=NODE_SETTINGS)
@click.argument("url")
@click.argument("member")
@click.option("--destroyed", is_flag=True, help="MEMBER never returns: continue even if only one of two members is left.")
@_RATE_OPTION
def forget(url: str, member: str, destroyed: bool, rate: int | None) -> int:
    """Remove MEMBER for good, whether it answers or is lost. The others get its data and its records.

    URL must still name it, and also its replacement if there is one. Clients continue meanwhile; change their URLs afterwards.
    """
    from ckpt.aggregator.file_io.namespace import open_namespace
    from ckpt.aggregator.maintenance import rebalance

    namespace, _ = open_namespace(url)
    with common.progress(_member_used_bytes(namespace, member), "moving") as advance:
        done = rebalance.remove_member(namespace, member, destroyed, _limit_rate(advance, rate))
    status = _print_moved(done)
    if not status:
        emit(f"{member} is forgotten: stop it, and take it out of the URLs")
        emit(f"records are kept by {', '.join(namespace.ring.all_members)}")
    return status


def _member_used_bytes(namespace: Namespace, member: str) -> int | None:
    """Return the bytes on a member; None if it does not report them."""
    try:
        return namespace.open_members[member].info().used_bytes if member in namespace.open_members else None
    except StoreError:
        return None


def _limit_rate(advance: ByteProgress, rate: int | None) -> ByteProgress:
    """Return an `advance` that also waits, so that no more than `rate` bytes are written per second."""
    from ckpt.aggregator.maintenance.repair import ByteRateLimiter

    pace = ByteRateLimiter(rate)

    def paced(nbytes: int) -> None:
        advance(nbytes)
        pace(nbytes)

    return paced


def _print_moved(done: RepairReport) -> int:
    """Print what was moved, and what was not; return the exit status."""
    emit(f"{format_count(done.files, 'file')} moved, {format_size(done.nbytes)}")
    for path, reason in done.failed.items():
        emit(f"{path}: {reason}")
    return int(bool(done.failed))


def _run_scrub(namespace: Namespace, verify: bool, grace: float) -> ScrubReport:
    from ckpt.aggregator.maintenance.scrub import scrub_namespace

    if not verify:
        return scrub_namespace(namespace, grace_seconds=grace)
    with common.growing_progress("checking") as (expect, advance):
        return scrub_namespace(namespace, True, advance, grace, expect)


def _consequence(health: FileHealth) -> str:
    if health.state == "lost":
        return "it can't be read"
    if not health.spare_fragments:
        return "one more lost fragment destroys it"
    return f"it survives the loss of {format_count(health.spare_fragments, 'more fragment')}"


def _print_unreadable(reasons: Mapping[str, str], most: int = 10) -> None:
    """Print the paths whose record can't be read, `most` of them at most, and what to do next."""
    if not reasons:
        return
    for path in [*reasons][:most]:
        emit(f"{path}: {reasons[path]}")
    if len(reasons) > most:
        emit(f"… and {len(reasons) - most} more")
    emit(
        f"{format_count(len(reasons), 'record')} can't be read, so no unreferenced object is deleted: start all members, "
        "install a newer ckpt-store if one wrote them, or write the files again under other names"
    )


def _print_findings(namespace: Namespace, found: ScrubReport) -> None:
    for health in found.damaged_files:
        damaged = Counter(member for member, _ in health.damaged_objects)
        emit(
            f"{health.path}: {health.state}, {_consequence(health)}"
            + "".join(f"; {format_count(count, 'damaged object')} on {member}" for member, count in damaged.items())
        )
    for member, names in found.orphans.items():
        emit(f"{member}: {format_count(len(names), 'object')} that no record names")
    _print_unreadable(found.unreadable_paths)
    if found.lagging_paths:
        differ, them = ("differs", "it") if len(found.lagging_paths) == 1 else ("differ", "them")
        emit(f"{format_count(len(found.lagging_paths), 'record')} {differ} between the members that keep {them}")
    for member, error in found.missing_members.items():
        emit(f"{member} is missing: {error}")
    if found.insufficient_redundancy:
        emit(
            f"files survive more lost members ({found.insufficient_redundancy}) than their records: repair, or add members and "
            "rebalance"
        )
    if found.unchecked_bytes:
        emit(f"{format_size(found.unchecked_bytes)} could not be checked")
    whole = "all whole" if found.is_whole else "not all whole"
    emit(f"{format_count(found.files, 'file')}, {format_size(found.nbytes)} in {namespace.url}: {whole}")
