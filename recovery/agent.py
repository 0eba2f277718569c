"""One host's part of a run: it starts the ranks that the log gives it, looks after them, ends them when the log says so, and
says what they do. It leads the run where it comes to that (coordinator.py)."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt import tier
from ckpt.recovery import course as courses
from ckpt.recovery import host, launch, memories, memory, metrics
from ckpt.recovery.accounts import Accounts
from ckpt.recovery.agents import LOST_SECONDS, SAY_SECONDS, Report, Wrong, listen, readable
from ckpt.recovery.console import Console
from ckpt.recovery.coordinator import Coordinator
from ckpt.recovery.course import Course, Member, Spec
from ckpt.recovery.decide import in_words
from ckpt.recovery.guardian import Guardian
from ckpt.recovery.keeper import Guard, Keeper, nodes_with_objects
from ckpt.recovery.launch import Share
from ckpt.recovery.lease import Lease
from ckpt.recovery.ledger import Name, totals
from ckpt.recovery.limits import Limits
from ckpt.recovery.rank_environment import allowed_environment
from ckpt.recovery.signals import Signals
from ckpt.recovery.state import Draft, Entry, State
from ckpt.recovery.voice import Voice
from ckpt.recovery.warm import WarmStarts
from ckpt.recovery.watch import Watch
from ckpt.storage.errors import CkptError, StoreError, Unavailable
from ckpt.storage.failpoints import failpoint
from ckpt.storage.web import Web
from ckpt.storage.words import count

log = logging.getLogger("ckpt.run")

_TICK_SECONDS = 0.05
_TIDY_SECONDS = 0.5
_JOIN_SECONDS = 10.0
"""A state that does not answer for so long at the beginning is no pause: the URL is wrong, or it is not there."""
_READ_SECONDS = 0.1
"""How often the log is read, where others write it."""


@dataclass(frozen=True, slots=True)
class Here:
    """What is this host's own."""

    name: str
    folder: Path
    """Its lock, its ledger, the logs."""
    address: str = "127.0.0.1"
    """Where the ranks of other hosts reach its own."""
    limits: Limits = field(default_factory=Limits)
    show: str = "0"
    """Whose output goes to the console: "0", "all" or "none"."""
    warm: bool = True
    """Ranks are forked from a process that has imported what they import, where that can be."""
    metrics: tuple[str, int] | None = None
    """Where /metrics is served."""
    through_mpi: bool = False
    """mpiexec starts the ranks, for programs that use MPI's own world."""
    again: bool = False
    """Begin anew where a run of several hosts has come to its end."""
    guard: Guard | None = None
    """Of the nodes in the memory of this host, where there are several hosts; None: there are none."""


class Agent:
    """The agent of this host, from the main thread."""

    def __init__(self, spec: Spec, here: Here, state: State, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._here = here
        self._state = state
        self._out = say
        self._incarnation = secrets.token_hex(8)
        self._mark = f"{launch.AGENT}={self._incarnation}"
        self._run = ""
        self._joined = time.time()
        self._port = launch.free_port(here.address)
        self._course = Course()
        self._log: list[Entry] = []
        self._watch: Watch | None = None
        self._accounts: Accounts | None = None
        self._warm = WarmStarts(spec.command) if here.warm and not here.through_mpi else None
        self._memory = memory.folder_of(here.folder) if spec.hosts == 1 else None
        self._held_bytes = 0
        self._keeper: Keeper | None = None
        self._unlisted: frozenset[str] = frozenset()
        self._attempt = -1
        self._best = -1
        self._wrong: Wrong | None = None  # of ranks that could not be started
        self._signals = Signals()
        self._read_at = self._tidy_at = 0.0
        self._status: int | None = None
        self._trouble = self._waits = ""
        self._said = ""
        self._told_stop = -1
        self._leaves = False

    def run(self) -> int:
        """The exit status: 0 the job has ended well, 1 it was given up, 128 + n it was asked to end by signal n."""
        host.adopt_orphans()
        with contextlib.closing(selectors.DefaultSelector()) as self._select, self._signals.heard(self._select):
            self._pages = Path(tempfile.mkdtemp(prefix="ckpt-run-", dir=_shared_memory()))
            try:
                return self._run_with_pages()
            finally:
                shutil.rmtree(self._pages, ignore_errors=True)

    def _run_with_pages(self) -> int:
        self._guardian = Guardian(self._mark, self._pages, LOST_SECONDS if self._spec.hosts > 1 else 0.0)
        self._console = Console(self._here.show)
        web = None
        try:
            web = self._serve()
            self._keeper = self._keep_memory()
            self._join()
            self._unlisted = self._unlisted_nodes()
            if self._status is not None:
                return self._status
            alone = self._spec.hosts == 1
            self._coordinator = Coordinator(self._state, alone)
            self._accounts = Accounts(self._here.folder, self._here.name, alone, self._log, self._coordinator)
            with contextlib.closing(Lease(self._state, self._guardian, self._here.name, self._spec.least)) as self._lease:
                self._voice = Voice(self._state, self._report(), self._lease)
                try:
                    return self._until_over()
                finally:
                    self._stop_ranks()
                    if self._status is not None:
                        self._bring_home()
                    self._voice.close()
        finally:
            if self._keeper is not None:
                self._keeper.close(free := self._frees_memory())
                if self._status is None and not free and memories.named(self._course.memory):
                    self._say("the run has not ended, and the memory is kept: start ckpt-run again")
            if web is not None:
                web.close()
            if self._warm is not None:
                self._warm.close()
            self._console.close()
            self._guardian.close()
            if self._accounts is not None:
                self._accounts.close(self._course)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone, a full disk: the log has it
            self._out(text)

    def _until_over(self) -> int:
        while True:
            self._look()
            self._follow_lease()
            try:
                while self._status is None and (self._follow() or self._lead()):
                    pass
                self._trouble = self._waits = ""
            except StoreError as error:
                self._went_wrong(error)
            if self._status is not None:
                return self._status
            if self._signals.first and self._may_leave():
                return 128 + self._signals.first
            self._wait()

    # --- joining -----------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Become part of the run under way, or begin one. Where the state does not answer, it is asked again for a while."""
        until = time.monotonic() + _JOIN_SECONDS
        while True:
            try:
                if self._joins():
                    return
            except Unavailable:
                if self._signals.first or time.monotonic() > until:
                    raise
                time.sleep(SAY_SECONDS)

    def _joins(self) -> bool:
        self._read()
        course, alone = self._course, self._spec.hosts == 1
        known = self._state.reports()
        goes_on = course.last is not None and not course.over
        comes_to = goes_on and not alone and course.spec == self._spec and not course.requested
        locked = alone and not self._state.remote
        asks = known and not locked and (self._here.name in known or not comes_to)  # who of them lives: that takes a while
        living = listen(self._state) if asks else {}
        if self._here.name in living:
            raise CkptError(f"another host of this run is called {self._here.name}; give this one another --name")
        if goes_on and living and (alone or course.spec != self._spec):
            same = "the same command and options as on the other hosts"
            then = "for one job on several hosts give --nnodes on each" if alone else f"give {same}"
            raise CkptError(f"another run is under way there ({_words(course.spec)}); {then}, or another --run-dir or --state")
        if comes_to:
            self._run = course.run
            return True
        left = not living and memories.named(course.memory)  # steps that are only in memory: the next run brings them home
        if course.final and not alone and course.spec == self._spec and not self._here.again and not left:
            assert course.last is not None
            self._status = int(course.last.facts["status"])
            self._say(f"the run has ended: {course.last.text}; to begin another, give --again")
            return True
        if course.last is None and self._keeper is not None and (nodes := nodes_with_objects(self._keeper.folder)):
            raise CkptError(
                f"the log of the run is empty, and {nodes[0]} holds steps of a run: the log was lost, or this is another "
                "--state. Give the --state of that run, or another --run-dir; if nobody needs these steps, remove "
                f"{self._keeper.folder}"
            )
        self._run = secrets.token_hex(6)
        drafts = [
            courses.run(course.attempt + 1, self._run, self._spec, _cut_off(course, known)),
            Draft(course.attempt + 1, "lead", f"{self._here.name} coordinates", {"name": self._here.name}),
        ]
        mine = self._report()
        self._state.report(mine.name, mine.facts())  # before it leads: the others take who says nothing for lost
        if not self._state.append(course.number, drafts):
            self._state.withdraw(mine.name)
            return False
        if course.spec is not None and course.spec.command != self._spec.command:
            before = " ".join(course.spec.command)
            self._say(f"another job was run there ({before}): the record and the ledger go on; give each its own --run-dir")
        failpoint("agent.begun")
        for name in known.keys() - living.keys() - {mine.name}:
            self._state.withdraw(name)
        self._read()
        return True

    def _read(self) -> list[Entry]:
        """What was written since."""
        entries = self._state.entries(self._course.number)
        self._read_at = time.monotonic()
        self._course = self._course.went_on(entries)
        self._log += entries
        return entries

    # --- following the log -------------------------------------------------------------------------------------

    def _follow(self) -> bool:
        """Make the ranks be as the log says; whether there was something to be done."""
        if self._is_fresh():
            return False
        for entry in self._read():
            if entry.kind == "run" and entry.facts["run"] != self._run:
                raise CkptError("another run was begun there, and this one is over; give each its own --run-dir or --state")
            self._tell(entry)
            if entry.kind == "end":
                self._status = int(entry.facts["status"])
                return True
        course, last = self._course, self._course.last
        assert last is not None
        goes_on = last.kind in ("start", "stop") and course.attempt == self._attempt
        if self._watch is not None and not goes_on:
            self._account("decide")
            if last.kind == "failure" or (course.failures and course.failures[-1].cause in ("hang", "stopped")):
                self._watch.keep_stacks()
            self._stop_ranks()
            return True
        mine = next((i for i, member in enumerate(course.members) if self._is_me(member)), None)
        if last.kind == "start" and mine is not None and course.attempt != self._attempt:
            self._account("spawn" if course.attempt == 0 else "decide")
            self._start(course.members[mine], mine, last)
            return True
        if last.kind == "stop" and self._watch is not None:
            self._watch.stop(int(last.facts["step"]), bool(last.facts["agreed"]))
        return False

    def _is_fresh(self) -> bool:
        """Whether the log was read a moment ago, and this agent has not written to it since."""
        alone = self._spec.hosts == 1 or self._course.leader == self._here.name
        return not alone and time.monotonic() - self._read_at < _READ_SECONDS

    def _is_me(self, member: Member) -> bool:
        return (member.name, member.incarnation) == (self._here.name, self._incarnation)

    def _tell(self, entry: Entry) -> None:
        """What the user should know at once."""
        given_up = entry.kind == "end" and entry.facts["status"] == 1 and entry.text != self._said
        remark = entry.kind == "note" and entry.facts
        if entry.kind == "stop" and self._told_stop != entry.attempt:
            self._told_stop = entry.attempt
            self._say(f"{entry.text}: the ranks save and end, within {self._spec.grace_seconds:g} s")
        elif entry.kind == "decision" or given_up or remark or (self._spec.hosts > 1 and entry.kind in ("lead", "start")):
            self._say(entry.text)
        self._said = entry.text

    def _start(self, member: Member, number: int, entry: Entry) -> None:
        self._attempt, self._wrong = entry.attempt, None
        self._lease.begin()
        facts, logs = entry.facts, self._here.folder / "logs" / str(entry.attempt)
        share = Share(
            self._course.run, entry.attempt, member.first, member.count, int(facts["ranks"]), number, facts["address"],
            int(facts["port"]), {**allowed_environment(facts.get("environment", {})), **self._own_environment()},
        )  # fmt: skip
        self._share = share
        failpoint("agent.start")
        try:
            ranks = launch.start(self._spec.command, share, self._pages, logs, self._warm, self._here.through_mpi)
        except CkptError as error:
            self._wrong = Wrong("exit", tuple(range(member.first, member.first + member.count)), f"did not start: {error}")
            if self._spec.hosts == 1 and not isinstance(error, Unavailable):
                self._state.append(self._course.number, [Draft(entry.attempt, "end", str(error), {"status": 1})])
                raise
            return
        for rank in ranks:
            self._guardian.add(rank.process.pid)
            self._select.register(rank.pidfd, selectors.EVENT_READ, rank)
        self._lease.protect([rank.process.pid for rank in ranks])
        best = max(self._best, *(failure.step for failure in self._course.failures), -1)  # a spare has seen none of it
        self._watch = Watch(ranks, self._here.limits, best, self._spec.straggler_seconds)
        self._console.follow(ranks)
        failpoint("agent.started")

    def _own_environment(self) -> dict[str, str]:
        """What the ranks of this host are told beside."""
        told = {launch.AGENT: self._incarnation, "TORCHELASTIC_MAX_RESTARTS": str(self._spec.restarts)}
        course, name = self._course, self._here.name
        now, *before = [each.url(name) for each in course.memory] or [""]
        if where := now if self._memory is None else str(self._memory):
            told[tier.VARIABLE] = where
        if before:
            told[tier.BEFORE] = " ".join(before)
        if course.newest.memory in course.memory[1:] and course.memory_seconds:
            told[tier.WAIT] = f"{course.memory_seconds:g} {course.newest.memory.url(name)}"
        return told

    # --- what is only in memory --------------------------------------------------------------------------------

    def _keep_memory(self) -> Keeper | None:
        """Where there are several hosts: what serves the memory of this one to all."""
        here = self._here
        if self._spec.hosts == 1 or here.guard is None:
            return None
        folder = memory.folder_of(here.folder, here.name)
        return None if folder is None else Keeper(folder, here.address, here.guard)

    def _unlisted_nodes(self) -> frozenset[str]:
        """Nodes that hold objects, and that no entry of the log names: nothing proves that nobody needs them."""
        if self._keeper is None:
            return frozenset()
        listed = {at for entry in self._log for at in memories.named(memories.from_facts(entry.facts.get("memory") or []))}
        found = frozenset(self._keeper.node_at(path) for path in nodes_with_objects(self._keeper.folder)) - listed
        if found:
            self._say(
                f"{', '.join(sorted(found))}: the log of the run does not name these nodes, and they hold steps; they are "
                f"kept. If nobody needs them, remove their folders in {self._keeper.folder} once this run has ended"
            )
        return found

    def _frees_memory(self) -> bool:
        """At the end of this agent, whether nothing that its memory holds is needed any more."""
        if self._status is None:  # others go on; or an error has come between
            return self._leaves and not self._memory_needed()
        return not memories.named(self._course.memory) and not self._unlisted

    def _memory_needed(self) -> bool:
        """Whether steps can't be read any more without the memory of this host."""
        name, reports = self._here.name, self._coordinator.reports()
        staying = {other: report for other, report in reports.items() if other != name and not report.leaving}
        return memories.is_needed(self._course.memory, name, staying)

    def _bring_home(self) -> None:
        """What is only in memory comes to where it belongs: on several hosts by who leads, for whom the others wait."""
        if self._memory is None:
            self._see_home()
            return
        if not (said := memory.bring_home(self._memory)):
            return
        if "has step" not in said:
            self._say(said)
        with contextlib.suppress(StoreError):
            self._state.append(self._course.number, [Draft(max(0, self._course.attempt), "note", said)])

    def _see_home(self) -> None:
        """Until it is done, or one is asked once more to end."""
        signals, until = self._signals.count, time.monotonic() + self._spec.give_up_seconds
        while self._is_open() and self._signals.count == signals and time.monotonic() < until:
            mine = replace(self._report(), leaving=0)  # who leads now leads to the end
            self._voice.say(mine)
            try:
                if self._course.leader == self._here.name:
                    self._drain()
                else:
                    self._coordinator.turn(self._course, mine)
                for entry in self._read():
                    if entry.kind == "memory" and (memory.BROUGHT in entry.text or entry.facts["memory"]):
                        self._say(entry.text)
                until = time.monotonic() + self._spec.give_up_seconds
            except StoreError as error:
                self._went_wrong(error)
            self._look()
            self._wait()
        if self._is_open():
            self._say("what may be only in memory was not brought home; the memory is kept: start ckpt-run again")

    def _drain(self) -> None:
        course = self._course
        done, said = memory.drain([each.url() for each in course.memory if each.nodes])
        failpoint("agent.home")
        kept = () if done else course.memory
        self._state.append(course.number, [courses.remembered(course, kept, said or "no step was only in memory")])

    def _is_open(self) -> bool:
        """Whether the run has ended, and what is only in memory was not looked after yet."""
        course = self._course
        return course.run == self._run and course.over and not course.home and bool(memories.named(course.memory))

    def _stop_ranks(self) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        self._best = max(self._best, watch.newest)
        self._lease.protect(())
        failpoint("agent.stop")
        for rank in watch.ranks:
            with contextlib.suppress(KeyError):
                self._select.unregister(rank.pidfd)
        launch.stop(watch.ranks, self._mark)
        for rank in watch.ranks:
            self._guardian.remove(rank.process.pid)
        self._port = launch.free_port(self._here.address)
        self._account("stop")

    def _follow_lease(self) -> None:
        """Where contact with the others was lost the ranks have been ended: what is left of them is ended, and reported."""
        self._lease.others(self._coordinator.reports())
        loss, watch = self._lease.take_loss(), self._watch
        if loss is None or watch is None or (watch.over and watch.wrong is None):  # all had ended well before
            return
        self._say(loss.text)
        self._stop_ranks()
        self._wrong = Wrong("lost", (), loss.detail, loss.seconds)
        self._voice.say(self._report())

    # --- what the ranks do -------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._keeper is not None:
            self._keeper.look(memories.named(self._course.memory) | self._unlisted)
        if self._watch is not None:
            self._watch.leaving = bool(self._signals.first)
            for rank in self._watch.look(time.monotonic()):
                self._select.unregister(rank.pidfd)
            if time.monotonic() >= self._tidy_at:
                self._tidy_at = time.monotonic() + _TIDY_SECONDS
                host.reap()
                self._guardian.look()
                if (folder := self._memory if self._keeper is None else self._keeper.folder) is not None:
                    self._held_bytes = memory.held_bytes(folder)
                if self._warm is not None:
                    launch.prepare(self._warm, self._share, self._pages)

    def _report(self) -> Report:
        watch, here = self._watch, self._here
        said = Report(
            here.name, self._incarnation, self._joined, os.getpid(), str(self._pages), str(here.folder / "logs"), here.address,
            self._port, self._attempt, wrong=self._wrong, leaving=self._signals.first, hurry=self._signals.count > 1,
            warm="" if self._warm is None else self._warm.said, held_bytes=self._held_bytes,
        )  # fmt: skip
        if (keeper := self._keeper) is not None:
            said = replace(said, memory=keeper.state, nodes=keeper.nodes, fresh=keeper.fresh)
        if watch is None:
            return said
        line, committed = watch.newest_committed
        return replace(
            said, doing="over" if watch.over else "running", wrong=watch.wrong, heard=watch.heard, step=watch.step,
            newest=watch.newest, committed=committed, line=line, durable=watch.durable, saved=watch.saved,
            restored=watch.restored, stop=watch.stops, stop_step=watch.stop_step, step_seconds=watch.step_seconds,
            spent=watch.spent, slowest=watch.slowest(time.monotonic()), paces=watch.paces,
        )  # fmt: skip

    def _lead(self) -> bool:
        """Take part in deciding; whether something was written."""
        mine = self._report()
        self._voice.say(mine)
        before = self._course
        assert self._accounts is not None
        try:
            return self._coordinator.turn(before, mine)
        finally:  # also where it can't be known whether something was written: what was heard is heard once
            self._accounts.turn(before, mine)

    def _account(self, name: Name) -> None:
        assert self._accounts is not None
        self._accounts.spent(self._course, name)

    def _serve(self) -> Web | None:
        if self._here.metrics is None:
            return None
        host, port = self._here.metrics
        try:
            return metrics.serve(host, port, self._metrics)
        except OSError as error:
            self._say(f"no metrics are served: {host}:{port} can't be listened on: {error.strerror}; give another --metrics")
            return None

    def _metrics(self) -> str:
        watch = self._watch
        beats = {} if watch is None else watch.beats
        return metrics.text(list(self._log), totals(self._here.folder), True, beats, time.monotonic(), self._held_bytes)

    # --- the end -----------------------------------------------------------------------------------------------

    def _may_leave(self) -> bool:
        """Whether the run can do without this agent, which was asked to end."""
        last = self._course.last
        assert last is not None
        if self._watch is None and self._spec.hosts > 1 and last.kind == "decision":
            self._leaves = True
        if self._watch is None and last.kind == "start" and not any(map(self._is_me, self._course.members)):
            self._leaves = True
        if self._leaves and not self._memory_needed():
            return True
        return time.monotonic() - self._signals.first_at > self._patience  # nobody decides any more

    def _went_wrong(self, error: StoreError) -> None:
        """The state does not answer: the ranks go on, and only what goes wrong meanwhile has to wait."""
        if not self._trouble:
            self._say(f"{error}. The ranks go on; what happens to them is dealt with when it answers again")
        self._trouble = str(error)
        waits, self._waits = self._waits, self._waiting()
        if self._waits and self._waits != waits:
            self._say(self._waits)

    def _waiting(self) -> str:
        """What has come to pass, and has to wait for the state; "" nothing."""
        watch = self._watch
        if self._signals.first:
            name = signal.Signals(self._signals.first).name
            return f"{name}: without the state the ranks can't be asked to save; they are ended within {self._patience:g} s"
        if watch is not None and watch.wrong is not None:
            wrong = watch.wrong
            return f"{in_words(wrong.ranks, wrong.detail)}; what is done about it is decided when the state answers"
        if watch is not None and watch.over:
            return "all ranks of this host have ended well; the run ends when the state answers, or by another signal"
        return ""

    @property
    def _patience(self) -> float:
        """Seconds that it waits for who decides, once it was asked to end."""
        return self._spec.grace_seconds + 2 * LOST_SECONDS

    def _wait(self) -> None:
        """Until something happens, and not for long."""
        for key, _ in self._select.select(_TICK_SECONDS):
            if key.data is self._signals:
                self._signals.awake()


def _cut_off(course: Course, known: Mapping[str, Mapping[str, Any]]) -> list[Report]:
    """The reports of the newest attempt, where the agents ended before one of them wrote what became of it."""
    if course.last is None or course.last.kind not in ("start", "stop"):
        return []
    return [each for each in readable(known).values() if each.attempt == course.attempt]


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _words(spec: Spec | None) -> str:
    if spec is None:
        return ""
    ranks = f"{count(spec.ranks, 'rank')}{' each' if spec.hosts > 1 else ''}"
    return f"{count(spec.hosts, 'host')} with {ranks}: {' '.join(spec.command)}"
