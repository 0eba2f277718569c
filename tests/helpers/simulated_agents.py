"""What stands in for the ranks, the memory nodes, the lease and the heartbeat of an agent in a simulated run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckpt.recovery.agent.agent_heartbeat import _without_progress
from ckpt.recovery.agent.host_lease import ContactLoss
from ckpt.recovery.coordinator.lost_contact import PROBE_SECONDS, Contact, Probe
from ckpt.recovery.memory_tier.memory_nodes import MemoryNodes
from ckpt.recovery.run_log.agent_reports import REPORT_SECONDS, AgentReport, HostFailure, PastProgress
from ckpt.recovery.run_log.base import LogEntry, RunLog
from ckpt.recovery.run_log.run_state import RunState
from ckpt.storage.base.errors import StoreError
from ckpt.storage.node.security_options import NodeSecurity
from helpers.simulated_hosts import STEP_SECONDS, World
from helpers.simulated_parts import Training, host_of


class SimulatedRanks:
    """Stands in for `HostRanks`."""

    def __init__(self, world: World, actor: str) -> None:
        self._world, self._actor, self._host = world, actor, host_of(actor)
        self.attempt = -1
        self.past: PastProgress | None = None
        self._training: Training | None = None
        self._failure: HostFailure | None = None

    @property
    def are_started(self) -> bool:
        return self._training is not None

    @property
    def have_ended(self) -> bool:
        return self._training is not None and self._training.is_over

    @property
    def failure(self) -> HostFailure | None:
        return None if self._training is None else self._training.failed.get(self._host)

    def start(self, entry: LogEntry, run_state: RunState, number: int, memory: dict[str, str], lease: SimulatedLease) -> None:
        self._world.step(self._actor, f"starts the ranks of attempt {entry.attempt}")
        self.attempt, self._failure = entry.attempt, None
        lease.begin_attempt()
        self._training = self._world.start_ranks(self._host, run_state, memory)

    def stop(self, lease: SimulatedLease) -> bool:
        if self._training is None:
            return False
        self._world.step(self._actor, "ends its ranks")
        self._training = None
        self._world.end_ranks(self._host)
        return True

    def set_failure(self, failure: HostFailure) -> None:
        self._failure = failure

    def poll(self, is_leaving: bool) -> None: ...

    def tidy(self) -> None: ...

    def save_stacks(self) -> None: ...

    def add_to_report(self, report: AgentReport) -> AgentReport:
        training = self._training
        if training is None:
            return replace(report, attempt=self.attempt, wrong=self._failure, past=self.past)
        restored = -1 if training.restored is None else training.restored
        committed = max(training.saved, restored)
        return replace(
            report, attempt=self.attempt, doing="over" if training.is_over else "running", wrong=self.failure, uses_ckpt=True,
            step=training.step, newest=training.step, committed=committed, line=1 if committed >= 0 else 0,
            durable=self._world.durable, saved=training.saved, restored=restored, step_seconds=STEP_SECONDS,
        )  # fmt: skip


class SimulatedNodes(MemoryNodes):
    """The memory nodes of one agent, whose process is part of the simulation."""

    def __init__(self, world: World, actor: str, folder: Path, address: str) -> None:
        self._world, self._actor = world, actor
        self._lines: list[tuple[float, str]] = []
        super().__init__(folder, address, NodeSecurity())

    def _start(self) -> None:
        self._process = object()  # type: ignore[assignment]
        for node in sorted(self._world.hosts[self._host].memory):
            self._answer(f"serves {node}")
        self._answer("ready")

    def _answer(self, line: str) -> None:
        self._lines.append((self._world.now + self._world.draw.choice([0.2, 1.0]), line))

    def _send_line(self, line: str) -> None:
        command, _, node = line.partition(" ")
        self._world.step(self._actor, f"{line} in its memory")
        if command == "fresh":
            self._answer(f"fresh {self._world.create_node(self._host)}")
        else:
            self._world.free(self._host, [node])

    def _read_lines(self) -> None:
        while self._lines and self._lines[0][0] <= self._world.now:
            line = self._lines.pop(0)[1]
            if line != "ready":
                self._world.hosts[self._host].served.add(line.partition(" ")[2])
            self._handle_line(line)

    def close(self) -> None:
        self._world.step(self._actor, "ends its nodes")

    def remove(self) -> None:
        self._world.step(self._actor, "frees its memory")
        self._world.free(self._host, sorted(self._world.hosts[self._host].memory))


class SimulatedLease:
    """Stands in for `HostLease`, by the same rules of lost contact."""

    def __init__(self, world: World, actor: str, min_hosts: int) -> None:
        self._world, self._actor, self._host = world, actor, host_of(actor)
        self._contact = Contact(world.now, min_hosts)
        self._others: frozenset[str] = frozenset()
        self._probed_at = 0.0

    def renew(self, at: float) -> None:
        self._contact = self._contact.after_acknowledgement(at)

    def begin_attempt(self) -> None:
        self._contact = self._contact.after_acknowledgement(self._world.now)

    def set_reports(self, reports: dict[str, AgentReport]) -> None:
        self._others = frozenset(reports) - {self._host}

    def take_loss(self) -> ContactLoss | None:
        world = self._world
        if world.now - self._probed_at >= PROBE_SECONDS:
            self._probed_at = world.now
            is_cut = world.hosts[self._host].cut_until > world.now
            tried = self._others if self._contact.is_state_unreachable(world.now) else frozenset()
            probe = Probe(world.now, world.now, world.reaches_log(self._actor), tried, tried if is_cut else frozenset())
            self._contact = self._contact.after_probe(probe)
        if world.hosts[self._host].ranks_of is None or not self._contact.is_lost(world.now):
            return None
        world.end_ranks(self._host)
        return ContactLoss(self._contact.silent_seconds(world.now), len(self._others), "the simulated log")

    def close(self) -> None: ...


class SimulatedHeartbeat:
    """Stands in for `AgentHeartbeat`, in the thread of the agent."""

    def __init__(self, world: World, run_log: RunLog, report: AgentReport, lease: SimulatedLease) -> None:
        self._world, self._run_log, self._report, self._lease = world, run_log, report, lease
        self._beat = 0
        self._publish()

    def set_report(self, report: AgentReport) -> None:
        has_changed = _without_progress(report) != _without_progress(self._report)
        self._report = report
        if has_changed or self._world.now - self._sent_at >= REPORT_SECONDS:
            self._publish()

    def tick(self) -> None: ...

    def end_watch(self) -> None: ...

    def _publish(self) -> None:
        self._beat += 1
        self._sent_at = self._world.now
        try:
            self._run_log.publish_report(self._report.name, replace(self._report, beat=self._beat).to_facts())
            self._lease.renew(self._sent_at)
        except StoreError:
            pass

    def close(self) -> None:
        try:
            self._run_log.remove_report(self._report.name, self._report.incarnation)
        except StoreError:
            pass
