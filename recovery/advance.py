"""The next entries of the log of a run, from what its log and its agents say. Pure: the coordinator is a loop around it, and
a coordinator that comes after one that died goes on where the log ends.

    run → start → failure → decision → start → … → end
               ↘ stop ↗      (it was asked to end, or a host is to leave: all save after the same step)
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ckpt.recovery import memories
from ckpt.recovery.agents import LOST_SECONDS, Report
from ckpt.recovery.course import Course, Member, Spec, failed, remembered
from ckpt.recovery.decide import Cause, Failure, choose, decide, suspects
from ckpt.recovery.state import Draft
from ckpt.recovery.stopping import Stop, next_stop
from ckpt.recovery.straggle import FACTOR, stragglers
from ckpt.storage.decode import decode
from ckpt.storage.words import count

_AHEAD_SECONDS = 0.5
"""With several hosts: how far ahead the step to stop after is named first. Some times what passes until agents read it."""

_COME_SECONDS = 2.0
"""Hosts that are started together are all there by then."""

_FIRST: Sequence[Cause] = ("diverged", "lost", "out of memory", "signal", "stopped", "hang", "unusable", "damaged", "exit")
"""Of failures that come together, which is the cause: ranks whose peer is gone exit with an error."""


@dataclass(frozen=True, slots=True)
class View:
    """All that a decision may depend on."""

    course: Course
    living: Mapping[str, Report]
    """By name."""
    perhaps: Mapping[str, Report]
    """The living, and those that were not listened to for long enough."""
    waited_seconds: float
    """Since the last entry was seen."""
    ran_seconds: float = 0.0
    """Since the attempt began."""
    silent: Mapping[str, Report] = field(default_factory=dict)
    """What hosts reported last that are silent now."""
    unheard: frozenset[str] = frozenset()
    """Of the hosts, those that have said nothing since something was first seen to be wrong."""


def advance(view: View) -> list[Draft]:
    """What to write now; empty: nothing has changed."""
    last = view.course.last
    assert last is not None
    if last.kind == "failure":
        return _decision(view, view.course.failures)
    if last.kind in ("start", "stop"):
        return _watched(view)
    if last.kind == "decision" and last.facts["action"] == "halt":
        final = view.course.failures[-1].cause != "asked"
        return [Draft(last.attempt, "end", last.text, {"status": last.facts["status"], "final": final})]
    return _begun(view) if last.kind in ("run", "decision") else []


# --- an attempt begins -------------------------------------------------------------------------------------------


def _begun(view: View) -> list[Draft]:
    course = view.course
    spec, last = course.spec, course.last
    assert spec is not None
    assert last is not None
    asked = max((r.leaving for r in view.living.values()), default=0)
    staying = {name: report for name, report in view.living.items() if not report.leaving}
    if course.requested or (asked and not staying):
        return [_ended(course, course.requested or "it was asked to end", asked)]
    if view.waited_seconds < float(last.facts.get("wait", 0.0)):
        return []
    if any(report.doing != "idle" for report in view.perhaps.values()):
        return []  # what is left of the attempt before must have ended
    ready = sorted(staying, key=lambda name: (staying[name].joined, name))
    before = [member.name for member in course.members]
    waited = view.waited_seconds >= (spec.patience_seconds if before else spec.give_up_seconds)  # at first some come late
    choice = choose(before, ready, suspects(course.failures), spec.hosts, spec.least, waited)
    if choice is None:
        if view.waited_seconds < spec.give_up_seconds:
            return _awaited(view, spec, len(ready))
        came = f"{len(ready)} of {count(spec.least, 'host')} came within {spec.give_up_seconds:g} s"
        return [_ended(course, f"{came}; start ckpt-run on more, or lower --min", 0)]
    if hosts := _memory_awaited(view):
        return _memory_note(course, hosts)
    memory = memories.at_start(course.memory, {name: staying[name] for name in choice.hosts}, course.newest.memory)
    if memory is None:
        return []
    attempt = course.attempt + 1
    members = [Member(name, staying[name].incarnation, i * spec.ranks, spec.ranks) for i, name in enumerate(choice.hosts)]
    first = staying[choice.hosts[0]]
    total = len(members) * spec.ranks
    where = "" if spec.hosts == 1 else f" on {', '.join(choice.hosts)}"
    changed = f", {choice.reason}" if choice.reason else ""
    facts = {
        "ranks": total, "command": list(spec.command), "members": [asdict(member) for member in members],
        "address": first.address, "port": first.port, "pages": first.pages, "logs": f"{first.logs}/{attempt}", "pid": first.pid,
        "environment": course.environment, "memory": memories.facts(memory),
    }  # fmt: skip
    return [Draft(attempt, "start", f"{count(total, 'rank')}{where}{changed}: {' '.join(spec.command)}", facts)]


def _memory_awaited(view: View) -> tuple[str, ...]:
    """The silent hosts that are waited for, as only they may have the newest steps."""
    if view.waited_seconds >= view.course.memory_seconds:
        return ()
    return memories.awaited(view.course.newest.memory, view.perhaps)


def _memory_note(course: Course, hosts: tuple[str, ...]) -> list[Draft]:
    """Written once for the same hosts."""
    if course.awaited == hosts:
        return []
    steps, seconds = count(course.newest.at_stake, "step"), course.memory_seconds
    text = f"waiting up to {seconds:.0f} s for {', '.join(hosts)}: silent, and {steps} may be in the memory there alone"
    return [Draft(max(0, course.attempt), "note", text, {"awaited": list(hosts)})]


def _awaited(view: View, spec: Spec, here: int) -> list[Draft]:
    """How many hosts are here, where more are waited for: said when that is another number than was said."""
    if view.waited_seconds < _COME_SECONDS or here == view.course.came:
        return []
    seconds = spec.patience_seconds if view.course.members else spec.give_up_seconds
    if here >= spec.least:
        then = f"with these it goes on {seconds:g} s after it began to wait"
    else:
        then = f"it gives up {spec.give_up_seconds:g} s after it began to wait"
    where = "with the same --state (agents of one host: --run-dir)"
    more = f"start the same command on {spec.hosts - here} more, {where}"
    text = f"{here} of {spec.hosts} hosts are here; {more}; {then}"
    return [Draft(max(0, view.course.attempt), "note", text, {"came": here})]


# --- and goes wrong, or well -------------------------------------------------------------------------------------


def _watched(view: View) -> list[Draft]:
    course = view.course
    last, spec = course.last, course.spec
    assert last is not None
    assert spec is not None
    here = {member.name: view.perhaps.get(member.name) for member in course.members}
    reports = [report for report in here.values() if report is not None and report.attempt == course.attempt]
    failures = [_lost(view, member) for member in course.members if _is_lost(member, here[member.name])]
    failures += [_wrong(view, report, reports) for report in reports if report.wrong is not None]
    cause = min(failures, key=lambda failure: _FIRST.index(failure.cause), default=None)
    ended = len(reports) == len(here) and all(report.doing == "over" for report in reports)
    asked = [report for name, report in view.living.items() if report.leaving and name in here]
    if last.kind == "stop":
        return _stopping(view, reports, asked, cause, ended)
    if cause is not None:
        # Ranks that have lost their peers may fail before those are silent for long enough to be lost.
        follows = _FIRST.index(cause.cause) > _FIRST.index("lost")
        return [] if follows and view.unheard & here.keys() else _with_decision(view, cause)
    if ended:
        return [Draft(course.attempt, "end", "all ranks have ended well", {"status": 0, "final": True})]
    if asked or course.requested:
        name = course.requested or signal.Signals(max(report.leaving for report in asked)).name
        return [_stop(course, reports, name)]
    drafts = [*_fell_back(course, reports), *_spares(view), *_stragglers(view, reports)]
    than = max(course.newest.step, course.saved, -1 if course.before is None else course.budget.best)
    if memories.is_newer(course.memory, reports, than) and not course.other_job:
        why = "what was in the memory of the hosts before is not needed any more"
        drafts.append(remembered(course, course.memory[:1], why))
    return drafts


def _stop(course: Course, reports: Sequence[Report], text: str) -> Draft:
    """All are to save after the same step, and to end."""
    several = course.spec is not None and course.spec.hosts > 1
    newest = max((report.newest for report in reports), default=-1)
    step_seconds = max(1e-6, min((report.step_seconds for report in reports), default=1.0))
    ahead = 1 + math.ceil(min(_AHEAD_SECONDS / step_seconds, 1e6)) if several else 1
    return Draft(course.attempt, "stop", text, asdict(Stop(newest + ahead, False, ahead)))


def _fell_back(course: Course, reports: Sequence[Report]) -> list[Draft]:
    """It went on from an older step than the newest that was saved, and nobody had decided so."""
    restored = max((report.restored for report in reports), default=-1)
    said = course.restored is not None or course.before is not None
    if said or not 0 <= restored < course.committed:
        return []
    text = (
        f"the ranks go on from step {restored}, as no later one is whole: {course.committed} was saved. Or the program has "
        "restored that step by name. Their logs say more"
    )
    return [Draft(course.attempt, "note", text, {"restored": restored})]


def _spares(view: View) -> list[Draft]:
    """Fewer hosts wait than were expected to, or as many again."""
    course = view.course
    assert course.spec is not None
    expected = course.spec.spares
    there = min(expected, len(_waiting(view)))
    said = expected if course.spares is None else course.spares
    if there == said or view.ran_seconds < course.spec.patience_seconds:
        return []
    more = "start the same command on more" if there < expected else "as many as were asked for"
    return [Draft(course.attempt, "note", f"{there} of {expected} spare hosts wait; {more}", {"spares": there})]


def _waiting(view: View) -> list[str]:
    """Hosts that could take the place of another."""
    taken = {member.name for member in view.course.members}
    return sorted(name for name, report in view.perhaps.items() if name not in taken and not report.leaving)


def _stragglers(view: View, reports: Sequence[Report]) -> list[Draft]:
    """Each is named once in an attempt. Where that is asked for, and another host waits, the host of the slowest is left out.

    A host is left out once: then it is suspected, and no longer counts among those that wait.
    """
    course = view.course
    spec = course.spec
    assert spec is not None
    found = stragglers((pace for report in reports for pace in report.paces), spec.straggler or FACTOR)
    hosts = {rank: member.name for member in course.members for rank in range(member.first, member.first + member.count)}
    spares = [name for name in _waiting(view) if name in view.living and name not in suspects(course.failures)]
    leave_out = bool(found and spec.straggler and spares)
    then = (
        "" if leave_out
        else "no other host waits" if spec.straggler and spec.hosts > 1
        else "look for what slows it there, or use another host" if spec.hosts == 1
        else "--straggler 2 starts the job again without it, where a spare waits"
    )  # fmt: skip
    drafts = []
    for one in found:
        if one.rank not in course.slow:
            text = one.in_words("" if spec.hosts == 1 else hosts[one.rank], spec.straggler_seconds)
            facts = {"straggler": one.rank, "host": hosts[one.rank], "times": one.times, "seconds": one.seconds}
            drafts.append(Draft(course.attempt, "note", f"{text}; {then}" if then else text, facts))
    if leave_out:
        host = hosts[found[0].rank]
        text = f"{host} is left out, as rank {found[0].rank} there is slow, and {spares[0]} waits"
        drafts += [Draft(course.attempt, "note", text, {"left_out": host}), _stop(course, reports, "--straggler")]
    return drafts


def _stopping(
    view: View, reports: Sequence[Report], asked: Sequence[Report], cause: Failure | None, ended: bool
) -> list[Draft]:
    """They were asked to save and to end. What fails by an exit, or hangs, has until the end of the grace all the same."""
    course = view.course
    last, spec = course.last, course.spec
    assert last is not None
    assert spec is not None
    hurry = any(report.hurry for report in asked)
    heard = any(report.heard for report in reports)
    if cause is not None and heard and cause.cause not in ("exit", "hang"):
        if course.left_out:  # it was no more than a wish
            return _with_decision(view, cause)
        why = f"{cause.detail} before all had saved, as {last.text} asked"
        return _with_decision(view, replace(cause, cause=_end_of(view, asked), detail=why))
    if ended or hurry or view.waited_seconds > spec.grace_seconds:
        why = (
            f"were ended by {last.text}, with no Checkpointer opened," if not heard
            else f"have ended, as {last.text} asked, but not well: {cause.detail}" if ended and cause is not None
            else f"have saved and ended, as {last.text} asked" if ended
            else f"were ended by {last.text}; they were not waited for" if hurry
            else f"were ended by {last.text}; they had no time to save"
        )  # fmt: skip
        ranks = [rank for member in course.members for rank in range(member.first, member.first + member.count)]
        return _with_decision(view, _failure(view, _end_of(view, asked), ranks, why, reports, course.left_out))
    asked_before = decode(Stop, last.facts)
    asked_now = _next_stop(asked_before, reports)
    return [Draft(last.attempt, "stop", last.text, asdict(asked_now))] if asked_now != asked_before else []


def _end_of(view: View, asked: Sequence[Report]) -> Cause:
    """preempted: only some hosts are to leave, and the others go on."""
    course = view.course
    several = course.spec is not None and course.spec.hosts > 1
    if not several or course.requested or len(asked) == len(view.living):
        return "asked"
    return "straggler" if course.left_out else "preempted"


def _next_stop(asked: Stop, reports: Sequence[Report]) -> Stop:
    """From what the agents say of their ranks."""
    told: list[tuple[int, int | None]] = []
    for report in reports:
        if report.doing == "over":
            continue
        if report.stop_step != asked.step or report.stop == "ahead":
            told.append((min(report.newest, asked.step - 1), None))
        else:
            told.append((report.newest, asked.step if report.stop == "heard" else None))
    return next_stop(asked, told)


def _is_lost(member: Member, report: Report | None) -> bool:
    return report is None or report.incarnation != member.incarnation


def _lost(view: View, member: Member) -> Failure:
    known = [r for r in view.perhaps.values() if r.attempt == view.course.attempt]
    known = known or [r for r in view.silent.values() if r.attempt == view.course.attempt]
    there = view.perhaps.get(member.name)
    detail = f"says nothing for {LOST_SECONDS:g} s" if there is None else "was started again"
    return _failure(view, "lost", [], detail, known, member.name)


def _wrong(view: View, report: Report, reports: Sequence[Report]) -> Failure:
    """With the rank that is behind all others as the cause of a hang: who waits for it hangs, too."""
    wrong = report.wrong
    assert wrong is not None
    if wrong.cause == "hang" and len(reports) > 1:
        behind = [(r.slowest, r.name) for r in reports if r.slowest is not None]
        if behind:
            slowest, host = min(behind, key=lambda each: (each[0].step, -each[0].silent_seconds))
            logs = f"{view.perhaps[host].logs}/{view.course.attempt}"
            return _failure(view, "hang", [slowest.rank], slowest.in_words(logs), reports, host)
    log = f"{report.logs}/{view.course.attempt}/rank-{wrong.ranks[0]}.log" if wrong.ranks else ""
    return replace(_failure(view, wrong.cause, wrong.ranks, wrong.detail, reports, report.name), bad=wrong.bad, log=log)


def _failure(view: View, cause: Cause, ranks: Sequence[int], detail: str, reports: Sequence[Report], host: str = "") -> Failure:
    """host: where it began. What that one says is of this moment; of the others it may be older than their last steps."""
    there = [report for report in reports if report.name == host] or reports
    step = min((r.step for r in there), default=-1)
    all_known = [r for r in (*view.silent.values(), *reports) if r.attempt == view.course.attempt]
    # What a silent host reported before stays true.
    line, committed = max(((r.line, r.committed) for r in all_known), default=(0, -1))
    return Failure(
        cause, tuple(ranks), detail, step if step < 0 else max(step, committed), committed, view.ran_seconds,
        host or (reports[0].name if reports else ""), restored=max((r.restored for r in all_known), default=-1),
        durable=max((r.durable for r in all_known), default=-1),
        step_seconds=max((r.step_seconds for r in there), default=0.0), line=line,
    )  # fmt: skip


# --- what then ---------------------------------------------------------------------------------------------------


def _with_decision(view: View, failure: Failure) -> list[Draft]:
    """Both at once; where only the failure came to be written, the next coordinator decides."""
    course = view.course
    return [failed(course.attempt, failure), *_decision(view, [*course.failures, failure])]


def _decision(view: View, failures: Sequence[Failure]) -> list[Draft]:
    course = view.course
    decision = decide(failures, course.budget, course.skip, course.before)
    facts: dict[str, object] = {"action": decision.action, "wait": decision.wait_seconds}
    facts |= {"before": decision.before, "skip": decision.skip, "limit": decision.limit}
    if decision.action == "halt":
        asked = max((r.leaving for r in view.living.values()), default=0)
        facts["status"] = 128 + asked if failures[-1].cause == "asked" and asked else int(failures[-1].cause != "asked")
    return [Draft(course.attempt, "decision", decision.reason, facts)]


def _ended(course: Course, text: str, asked: int) -> Draft:
    return Draft(course.attempt, "end", text, {"status": 128 + asked if asked else int(not course.requested)})
