"""A run of `ckpt-run` on several hosts, by the code of the product, on a clock that only the simulation moves.

The agents, their coordinators, the run log with its entries and reports, and the choice of the memory that an attempt uses are
those of the product. What stands in for the rest is small: ranks that make steps and save each of them, nodes in the memory of
hosts, and the network. A seed decides which agents are killed, which hosts are stopped, cut off or lost, for how long, and
which replies of the run log are lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ckpt.recovery.agent import agent, agent_loop, followed_log, host_memory, joining
from ckpt.recovery.agent.host_options import HostOptions
from ckpt.recovery.coordinator import coordinator
from ckpt.recovery.memory_tier import local, memory_nodes
from ckpt.recovery.run_log import agent_reports
from ckpt.recovery.run_log.agent_name import holder_of, require_holder
from ckpt.recovery.run_log.base import Draft, LogEntry, RunLog
from ckpt.recovery.run_log.run_spec import RunSpec
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.node.security_options import NodeSecurity
from helpers.interleaving import Actor, Interleaving, Scheduler
from helpers.simulated_agents import SimulatedHeartbeat, SimulatedLease, SimulatedNodes, SimulatedRanks
from helpers.simulated_hosts import World
from helpers.simulated_parts import host_of

TICK_SECONDS = 0.25
"""How long an agent waits in its loop."""
LIMIT_SECONDS = 1500.0
"""A run that has not ended by then never ends."""


class _Clock(Scheduler):
    """Runs the actor whose time comes first, and moves the clock to that time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def next(self, living: Sequence[Actor], current: Actor | None, steps: list[str]) -> Actor | None:
        world = self._world
        while True:
            awake = {actor: world.wakes_at(actor.name) for actor in living if not actor.is_killed}
            chosen = min(awake, key=lambda actor: (awake[actor], actor.name), default=None)
            if chosen is None:
                return None
            killed = world.move_clock(awake[chosen])
            for actor in living:
                if actor.name in killed:
                    actor.is_killed = True
                    steps.append(f"{world.now:.2f} {actor.name} is killed")
            if not killed:
                assert world.now < LIMIT_SECONDS, "the run does not end"
                return chosen


class SimulatedRunLog(RunLog):
    """The run log, as one agent reaches it."""

    is_remote = True

    def __init__(self, world: World, actor: str) -> None:
        self._world, self._actor = world, actor

    def entries(self, after: int = 0) -> list[LogEntry]:
        return self._call("reads the log", lambda: self._world.log[after:])

    def append(self, after: int, drafts: Sequence[Draft]) -> bool:
        kinds = " and ".join(draft.kind for draft in drafts)
        return self._call(f"appends {kinds}", lambda: self._world.append(after, drafts))

    def reports(self) -> dict[str, dict[str, Any]]:
        return self._call("reads reports", lambda: dict(self._world.reports))

    def publish_report(self, name: str, facts: Mapping[str, Any], replaces: str = "") -> None:
        def publish() -> None:
            require_holder(name, self._world.reports.get(name), facts, replaces)
            self._world.reports[name] = dict(facts)

        self._call("reports", publish)

    def remove_report(self, name: str, incarnation: str = "") -> None:
        def remove() -> None:
            if not incarnation or holder_of(self._world.reports.get(name)) == incarnation:
                self._world.reports.pop(name, None)

        self._call("removes its report", remove)

    def close(self) -> None: ...

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        world = self._world
        world.step(self._actor, what)
        if not world.reaches_log(self._actor):
            raise Unavailable("the run log does not answer")
        answer = call()
        if world.is_reply_lost():
            raise Unavailable("the reply of the run log was lost")
        return answer


class _Select:
    """Waits by the clock of the simulation."""

    def __init__(self, world: World, actor: str) -> None:
        self._world, self._actor = world, actor

    def select(self, seconds: float) -> list[Any]:
        self._world.sleep(self._actor, TICK_SECONDS)
        return []

    def close(self) -> None: ...


class _Signals:
    """No signal ever arrives."""

    first = count = 0
    first_at = 0.0

    @contextmanager
    def installed(self, select: Any) -> Iterator[None]:
        yield


class RecoverySimulation:
    """One run, from its first entry to the end of its last agent."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.world = World(draw)
        self.interleaving = Interleaving(_Clock(self.world))
        self.world.interleaving = self.interleaving
        self._spec = RunSpec(
            ("train",), 1, self.world.host_count, self.world.least, restarts=30, patience_seconds=draw.choice([2.0, 8.0]),
            give_up_seconds=300.0,
        )  # fmt: skip
        self.lines: list[str] = []
        """What the agents print."""
        self._statuses: dict[str, int] = {}
        """The exit status of each agent that has ended by itself."""

    def run(self) -> None:
        """Let the agents run until all have ended. Raises AssertionError if a promise is broken."""
        world = self.world
        for name, begins_at in world.agents:
            world.sleep_until(name, begins_at)
            self.interleaving.add(name, partial(self._run_agent, name))
        with self._on_its_clock():
            errors = self.interleaving.run()
        for error in errors.values():
            if error is not None:
                raise error
        world.check_end(self._statuses)

    def _run_agent(self, name: str) -> None:
        """Run the agent of a host, and start it again where the run log did not answer when it began."""
        world, host = self.world, host_of(name)
        options = HostOptions(host, Path("/run"), address=host, use_fork_server=False, security=NodeSecurity())
        world.step(name, "begins")
        while world.begin_agent(name):
            made = agent.Agent(self._spec, options, SimulatedRunLog(world, name), partial(self._print, name))
            try:
                self._statuses[name] = made.run()
            except Unavailable:
                world.end_agent(name)
                world.sleep(name, 5.0)
                continue
            world.end_agent(name)
            return

    def _print(self, name: str, text: str) -> None:
        self.lines.append(f"{self.world.now:.2f} {name}: {text}")

    @contextmanager
    def _on_its_clock(self) -> Iterator[None]:
        """Replace clocks, sleeps and what an agent starts, in the modules of the product that the simulation runs."""
        world, names = self.world, random.Random(self.world.draw.random())
        clock = SimpleNamespace(
            monotonic=lambda: 1e5 + world.now,
            time=lambda: 1e9 + world.now,
            sleep=lambda seconds: world.sleep(world.actor, seconds),
        )
        nothing = SimpleNamespace(close=_ignore, account=_ignore, account_start=_ignore, account_by_reports=_ignore)
        of_agent = {
            "selectors": SimpleNamespace(DefaultSelector=lambda: _Select(world, world.actor)),
            "tempfile": SimpleNamespace(mkdtemp=lambda **_: "/pages"),
            "shutil": SimpleNamespace(rmtree=lambda *_, **__: None),
            "process_kill": SimpleNamespace(adopt_orphans=_ignore),
            "launch": SimpleNamespace(free_port=lambda _: 1),
            "OrphanGuard": lambda *_: nothing,
            "LogConsole": lambda *_: nothing,
            "TimeAccounting": lambda *_: nothing,
            "Signals": _Signals,
            "HostRanks": lambda *_: SimulatedRanks(world, world.actor),
            "HostLease": lambda run_log, guard, name, least: SimulatedLease(world, world.actor, least),
            "AgentHeartbeat": lambda run_log, report, lease, _: SimulatedHeartbeat(world, run_log, report, lease),
        }
        others = (
            (host_memory, "MemoryNodes", lambda folder, address, security: SimulatedNodes(world, world.actor, folder, address)),
            (host_memory, "nodes_with_steps", lambda folder: world.nodes_with_steps(folder.name)),
            (joining, "nodes_with_steps", lambda folder: world.nodes_with_steps(folder.name)),
            (local, "memory_folder", lambda folder, host="": Path("/memory", host)),
            (local, "drain_urls", world.drain),
        )
        with ExitStack() as patches:
            for module in (agent, agent_loop, followed_log, joining, coordinator, agent_reports, memory_nodes):
                patches.enter_context(patch.object(module, "time", clock))
            for module, name, new in (*((agent, *each) for each in of_agent.items()), *others):
                patches.enter_context(patch.object(module, name, new))
            patches.enter_context(patch("secrets.token_hex", lambda nbytes=32: names.randbytes(nbytes).hex()))
            yield


def _ignore(*_: object) -> None: ...
