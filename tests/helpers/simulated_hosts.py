"""The hosts of a simulated run: their ranks, the memory in which these save, the network between them, and what fails.

The ranks of an attempt make a step each 0.5 s, and save each step in the memory of the hosts. Every twentieth step is copied to
the repository. These promises of the documentation are checked:

* Ranks continue from the newest step that was saved, unless its memory is destroyed, or silent for at least 10 s.
* Memory is freed only if a newer step, or the same one, is kept elsewhere, and is as safe there.
* Ranks of an attempt start after those of the attempt before have ended, on all hosts that are reachable.
* The run ends with success once nothing fails any more.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ckpt.recovery.run_log.agent_reports import HostFailure
from ckpt.recovery.run_log.base import Draft, LogEntry
from ckpt.recovery.run_log.entry_facts import memories_of
from ckpt.recovery.run_log.memory_placement import MemoryNamespace
from ckpt.recovery.run_log.run_state import RunState
from ckpt.tiers.drain_report import DrainReport
from ckpt.tiers.memory_folder import MEMORY_WAIT_VARIABLE
from helpers.interleaving import Interleaving, current_actor_name
from helpers.simulated_parts import Fault, Host, Nodes, Training, host_of

STEPS = 40
"""How many steps the job makes."""
STEP_SECONDS = 0.5
COPIED_STEPS = 20
"""Each step whose number is a multiple of this is copied to the repository."""
PROMISED_WAIT_SECONDS = 10.0
"""A host that is silent for less than this is not taken for lost, if it may have the newest step alone."""
RETURN_SECONDS = 1.0
"""A host that returns has ended the ranks of an earlier attempt after this time."""
FAULT_SECONDS = 60.0
"""When the last fault begins."""


class World:
    """All hosts, the run log, the training, and the clock of one run. draw: decides what happens."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.now = draw, 0.0
        self.interleaving: Interleaving
        self.host_count = draw.choice([2, 2, 3])
        self.least = draw.choice([self.host_count, self.host_count - 1])
        self.hosts = {name: Host(name) for name in ("h0", "h1", "h2", "h3")[: self.host_count + draw.choice([0, 0, 1])]}
        self.log: list[LogEntry] = []
        self.reports: dict[str, dict[str, Any]] = {}
        self.durable = -1
        """The newest step in the repository."""
        self._steps: dict[Nodes, int] = {}
        """The newest step in each namespace, by its nodes."""
        self._released: set[tuple[str, str]] = set()
        """The nodes that the log has released."""
        self._next_port = 7000
        self._trainings: dict[int, Training] = {}
        self._loss = draw.choice([0.0, 0.0, 0.01])
        self._log_down_until = 0.0
        self._do_peers_fail = draw.random() < 0.5
        self.agents = [(name, draw.choice([0.0, 0.3, 1.5])) for name in self.hosts]
        """All agents, and when each begins."""
        self._faults = sorted(self._draw_fault() for _ in range(draw.choice([1, 2, 3, 5])))
        for number, fault in enumerate(self._faults):
            if fault.kind in ("kill", "lose"):
                self.agents.append((f"{fault.hosts[0]} again {number}", fault.at + fault.seconds))
        self._wakes: dict[str, float] = {}

    def _draw_fault(self) -> Fault:
        kind = self.draw.choice(["kill", "stop", "stop", "cut", "lose", "rank", "log"])
        seconds = self.draw.choice([0.5, 2.0, 3.5, 5.0, 8.0, 20.0])
        count = 2 if kind in ("stop", "cut") and self.draw.random() < 0.3 else 1
        return Fault(self.draw.uniform(3.0, FAULT_SECONDS), kind, tuple(self.draw.sample(sorted(self.hosts), count)), seconds)

    @property
    def attempts(self) -> int:
        """The number of attempts that were started."""
        return len(self._trainings)

    @property
    def has_ended(self) -> bool:
        """Whether the run log has an end. After it nothing fails any more."""
        return any(entry.kind == "end" for entry in self.log)

    # --- the clock -------------------------------------------------------------------------------------------------

    @property
    def actor(self) -> str:
        """The name of the agent that runs now."""
        return current_actor_name()

    def step(self, actor: str, what: str) -> None:
        """Let what happens before this call of an agent happen. Raises Killed if the agent was killed."""
        self._wakes[actor] = self.now + self.draw.uniform(0.001, 0.02)
        self.interleaving.step(f"{self.now:.2f} {what}")

    def sleep(self, actor: str, seconds: float) -> None:
        """Let an agent wait."""
        self._wakes[actor] = self.now + seconds
        self.interleaving.step("waits")

    def sleep_until(self, actor: str, at: float) -> None:
        """Let an agent begin at a time."""
        self._wakes[actor] = at

    def wakes_at(self, actor: str) -> float:
        """Return when an agent can continue."""
        return max(self._wakes[actor], self._host(actor).stopped_until)

    def move_clock(self, to: float) -> set[str]:
        """Move the clock to the next fault or to a time, and return the agents that are killed then."""
        fault = self._faults[0] if self._faults and self._faults[0].at <= to else None
        self.now = max(self.now, to if fault is None else fault.at)
        self._notice_returns()
        if self._trainings:
            self._train(self._trainings[max(self._trainings)])
        if fault is None:
            return set()
        del self._faults[0]
        return set() if self.has_ended else self._apply(fault)

    def _notice_returns(self) -> None:
        for host in self.hosts.values():
            if host.silent_since is not None and host.agent and max(host.stopped_until, host.cut_until) <= self.now:
                host.silent_since, host.returned_at = None, self.now

    def _apply(self, fault: Fault) -> set[str]:
        self.interleaving.steps.append(f"{self.now:.2f} fault: {fault.kind} {' '.join(fault.hosts)} {fault.seconds:g} s")
        if fault.kind == "log":
            self._log_down_until = self.now + fault.seconds
            return set()
        return set().union(*(self._apply_to(self.hosts[name], fault) for name in fault.hosts))

    def _apply_to(self, host: Host, fault: Fault) -> set[str]:
        if fault.kind == "rank":
            if host.ranks_of is not None:
                training, host.ranks_of = self._trainings[host.ranks_of], None
                training.failed[host.name] = _killed_rank(training, host.name)
        elif fault.kind in ("stop", "cut"):
            if host.silent_since is None:
                host.silent_since = self.now
            if fault.kind == "stop":
                host.stopped_until = max(host.stopped_until, self.now + fault.seconds)
            else:
                host.cut_until = max(host.cut_until, self.now + fault.seconds)
        else:
            killed = {host.agent} - {""}
            self._end(host)
            if fault.kind == "lose":
                host.memory.clear()
            return killed
        return set()

    # --- agents ----------------------------------------------------------------------------------------------------

    def _host(self, actor: str) -> Host:
        return self.hosts[host_of(actor)]

    def begin_agent(self, actor: str) -> bool:
        """Note that an agent begins; return False if its host has one, or if the run has ended."""
        host = self._host(actor)
        if host.agent or self.has_ended:
            return False
        host.agent = actor
        self._notice_returns()
        return True

    def end_agent(self, actor: str) -> None:
        """Note that an agent has ended by itself."""
        self._end(self._host(actor))

    def _end(self, host: Host) -> None:
        if host.silent_since is None:
            host.silent_since = self.now
        host.agent, host.ranks_of = "", None
        host.served.clear()

    def is_reachable(self, host: str) -> bool:
        """Return whether the agent of a host runs and answers."""
        return self.hosts[host].silent_since is None

    def reaches_log(self, actor: str) -> bool:
        """Return whether the run log answers an agent."""
        return self.now >= max(self._log_down_until, self._host(actor).cut_until)

    def is_reply_lost(self) -> bool:
        """Return whether the reply of the run log to this call is lost."""
        return self.draw.random() < self._loss

    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        """Append entries after a number, as the run log does. Raises AssertionError if one gives needed memory up."""
        if after != len(self.log):
            return False
        for draft in drafts:
            entry = LogEntry(len(self.log) + 1, self.now, draft.attempt, draft.kind, draft.text, dict(draft.facts))
            if draft.kind == "memory" and not self.has_ended:
                kept = [memory.nodes for memory in memories_of(entry)]
                self._require_as_safe(kept)
                self._released |= {node for nodes in self._steps.keys() - set(kept) for node in nodes}
            self.log.append(entry)
        return True

    # --- memory ----------------------------------------------------------------------------------------------------

    def create_node(self, host: str) -> str:
        """Return HOST:PORT of a new node in the memory of a host."""
        self._next_port += 1
        node = f"{host}:{self._next_port}"
        self.hosts[host].memory.add(node)
        return node

    def nodes_with_steps(self, host: str) -> list[Path]:
        """Return the folders of the nodes of a host that have steps."""
        used = {at for nodes in self._steps for _, at in nodes}
        return [Path(f"/memory/{host}", at.partition(":")[2]) for at in sorted(self.hosts[host].memory & used)]

    def free(self, host: str, nodes: Sequence[str]) -> None:
        """Delete nodes, as an agent does with those that nobody needs. Raises AssertionError if somebody does.

        An agent that was stopped may do so long after the log released the nodes. What other hosts have lost since then is not
        a fault of the release, which was checked when it was logged.
        """
        before = self._newest(self._steps)
        self.hosts[host].memory.difference_update(nodes)
        self.hosts[host].served.difference_update(nodes)
        after = self._newest(self._steps)
        if not self._released.issuperset((host, node) for node in nodes):
            assert after >= before, f"{self.now:.2f} {host} frees {nodes}: step {before} is lost, the newest one is {after}"

    def _require_as_safe(self, kept: Sequence[Nodes]) -> None:
        """Check that the newest step is as safe in some namespaces as in all of them."""
        if any(at not in self.hosts[host].memory for host, at in kept[0]):
            return  # a host was lost a moment ago, and nobody knows it yet
        for lost in self.hosts:
            before, after = self._newest(self._steps, lost), self._newest(kept, lost)
            assert after >= before, f"{self.now:.2f} step {before} is lost if {lost} is lost now, and {kept} has step {after}"

    def _newest(self, namespaces: Iterable[Nodes], lost: str = "") -> int:
        """Return the newest step in the repository and in some namespaces. lost: a host that counts as lost, too."""
        return max([self.durable, *(self._steps.get(nodes, -1) for nodes in namespaces if self._is_intact(nodes, lost))])

    def _is_intact(self, nodes: Nodes, lost: str = "") -> bool:
        return sum(host == lost or at not in self.hosts[host].memory for host, at in nodes) <= _tolerated(nodes)

    def _answers(self, nodes: Nodes) -> bool:
        absent = sum(at not in self.hosts[host].served or not self.is_reachable(host) for host, at in nodes)
        return absent <= _tolerated(nodes)

    def drain(self, urls: Sequence[str], rolled_back: bool) -> DrainReport:
        """Copy the newest step of namespaces to the repository, as `local.drain_urls` does."""
        assert not rolled_back, "nothing that the simulation lets fail is a reason to roll back"
        namespaces = {MemoryNamespace(nodes).url(): nodes for nodes in self._steps}
        urls = [url for url in urls if url in namespaces]
        steps = [self._steps[namespaces[url]] if self._answers(namespaces[url]) else None for url in urls]
        if self.draw.random() < 0.1:
            return DrainReport("could not be drained: the repository does not answer", has_failed=True)
        found = [step for step in steps if step is not None]
        self.durable = max([self.durable, *found])
        if steps and steps[0] is None:
            return DrainReport("could not be drained", has_failed=True)
        unread = tuple(url for url, step in zip(urls, steps, strict=True) if step is None)
        text = "step 1 was brought from memory" if found else ""
        return DrainReport(text, bool(found), newest_step=max(found, default=-1), unread=unread)

    # --- ranks -----------------------------------------------------------------------------------------------------

    def start_ranks(self, host: str, run_state: RunState, environment: dict[str, str]) -> Training:
        """Start the ranks of a host in an attempt."""
        assert run_state.restore_step_limit is None, "nothing that the simulation lets fail is a reason to roll back"
        members = tuple(member.name for member in run_state.attempt_hosts)
        for other in self.hosts.values():
            has_returned = (
                self.is_reachable(other.name) and self.now - max(other.returned_at, self._log_down_until) > RETURN_SECONDS
            )
            late = has_returned and other.ranks_of not in (None, run_state.attempt)
            assert not late, f"{self.now:.2f} ranks of {run_state.attempt} start on {host}, others run on {other.name}"
        training = self._trainings.get(run_state.attempt)
        if training is None:
            awaited = environment.get(MEMORY_WAIT_VARIABLE, "")
            training = Training(run_state.attempt, members, run_state.memory, awaited, self.now + 0.5)
            self._trainings[run_state.attempt] = training
        self.hosts[host].ranks_of = run_state.attempt
        return training

    def end_ranks(self, host: str) -> None:
        """End the ranks of a host."""
        self.hosts[host].ranks_of = None

    def _train(self, training: Training) -> None:
        """Let the ranks of an attempt do what they have done until now."""
        self._copy(training)
        members = [self.hosts[name] for name in training.members]
        run = [host.ranks_of == training.attempt and self.is_reachable(host.name) for host in members]
        if training.is_over or training.failed or not all(run):
            self._stall(training, members, run)
            return
        training.stalled_since = None
        if training.restored is None:
            self._restore(training)
        while training.restored is not None and not training.is_over and training.at <= self.now:
            training.step += 1
            training.at += STEP_SECONDS
            self._save(training)
            training.is_over = training.step >= STEPS

    def _copy(self, training: Training) -> None:
        while training.copies and training.copies[0][0] <= self.now:
            _, step = training.copies.pop(0)
            if any(self.hosts[name].ranks_of == training.attempt for name in training.members):
                self.durable = max(self.durable, step)

    def _stall(self, training: Training, members: Sequence[Host], run: Sequence[bool]) -> None:
        """Ranks wait for a peer that is gone. Some frameworks end them after a while."""
        training.at = max(training.at, self.now + STEP_SECONDS)
        if training.stalled_since is None:
            training.stalled_since = self.now
        if self._do_peers_fail and training.restored is not None and self.now > training.stalled_since + 1.0:
            for host, runs in zip(members, run, strict=True):
                if runs and not training.is_over:
                    training.failed.setdefault(host.name, _killed_rank(training, host.name))

    def _restore(self, training: Training) -> None:
        """Let the ranks restore the newest step that they can read, and check that it is the right one."""
        if training.at > self.now:
            return
        namespaces = [memory.nodes for memory in training.memory if memory.nodes in self._steps]
        seconds, _, url = training.awaited.partition(" ")
        awaited = [nodes for nodes in namespaces if MemoryNamespace(nodes).url() == url.partition("&near")[0]]
        if any(not self._answers(nodes) for nodes in awaited) and self.now < training.at + float(seconds):
            return
        found = [self._steps[nodes] for nodes in namespaces if self._answers(nodes)]
        restored = max([self.durable, *found])
        self._require_newest(restored)
        training.restored = training.step = restored
        training.at = self.now + STEP_SECONDS
        self.interleaving.steps.append(f"{self.now:.2f} attempt {training.attempt} continues from step {restored}")

    def _require_newest(self, restored: int) -> None:
        for nodes, step in self._steps.items():
            if step <= restored or not self._is_intact(nodes):
                continue
            silent = [since for host, _ in nodes if (since := self.hosts[host].silent_since) is not None]
            is_silent_long = bool(silent) and self.now - max(silent) >= PROMISED_WAIT_SECONDS
            assert is_silent_long, f"{self.now:.2f} step {restored} is restored, and step {step} is in the memory {nodes}"

    def _save(self, training: Training) -> None:
        nodes = training.memory[0].nodes if training.memory else ()
        if nodes and all(at in self.hosts[host].served and self.is_reachable(host) for host, at in nodes):
            self._steps[nodes] = training.step
            if training.step % COPIED_STEPS == 0:
                training.copies.append((self.now + 0.7, training.step))
        else:
            self.durable = training.step
        training.saved = training.step

    # --- the end ---------------------------------------------------------------------------------------------------

    def check_end(self, statuses: dict[str, int]) -> None:
        """Raise AssertionError if the run has not ended with success and with its last step saved."""
        ends = [entry for entry in self.log if entry.kind == "end"]
        assert ends, "the run has not ended"
        assert ends[-1].facts["status"] == 0, f"the run ended with status {ends[-1].facts['status']}: {ends[-1].text}"
        assert not any(statuses.values()), statuses
        newest = self._newest(self._steps)
        assert newest >= STEPS, f"step {STEPS} was saved, and the newest one is {newest}"


def _tolerated(nodes: Nodes) -> int:
    return min(2, len(nodes)) - 1


def _killed_rank(training: Training, host: str) -> HostFailure:
    return HostFailure("signal", (training.members.index(host),), "was killed by SIGKILL")
