"""A host that has lost contact ends its own ranks, and no other host does: hosts are network namespaces, one of which has
etcd."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.etcd_server import needs_etcd
from helpers.host_runs import OnHosts, answers, assert_result, starts
from helpers.network_namespaces import Hosts, hosts_on_a_wire
from helpers.processes import stop, until
from helpers.runs import have_ended

from ckpt.recovery.agent.reachability import Address, AddressCache, find_unreachable
from ckpt.recovery.ranks import processes
from ckpt.recovery.run_log.agent_reports import LOST_SECONDS
from ckpt.recovery.run_log.base import LogEntry

pytestmark = needs_etcd

ETCD = 3
"""The host that it runs on."""
LOST = "so the ranks here are ended"
NAME = "etcd0.example"


class Lab:
    """Three hosts with two ranks each, which save nothing: only the files of their ends show what they did."""

    def __init__(self, hosts: Hosts, folder: Path, *options: str, at: str = "", steps: int = 900) -> None:
        self.hosts = hosts
        self.etcd = hosts.run_etcd(ETCD, folder / "etcd")
        until(lambda: answers(f"http://{hosts.etcd_at(ETCD)}"))
        self.run = OnHosts(folder / "job", f"etcd://{at or hosts.etcd_at(ETCD)}/lab", *options, steps=steps)
        self.run.state = ["--state", f"etcd://{hosts.etcd_at(ETCD)}/lab"]  # the URL as this process reaches it
        self.run.hosts = hosts
        self._state = ["--state", f"etcd://{at or hosts.etcd_at(ETCD)}/lab"]

    def start(self, step: int = 12, failpoints: str = "") -> None:
        named, self.run.state = self.run.state, self._state
        for name in "abc":
            self.run.start(name, failpoints=failpoints)
        self.run.state = named
        self.run.until_step(step)

    def host_of(self, position: int) -> int:
        return "abc".index(starts(self.run.log())[0][position])

    def step(self, rank: int, attempt: int = 0) -> int:
        """Return the last step that a rank has done. This needs no reply of etcd."""
        return self.run._step(self.run.folder / f"at-{attempt}-{rank}")

    def wait_for_steps(self, steps: int, ranks: int = 6) -> None:
        """Wait until all ranks have done this many more steps."""
        begun = [self.step(rank) for rank in range(ranks)]
        until(lambda: all(self.step(rank) >= begun[rank] + steps for rank in range(ranks)))

    def ends_well(self, ranks: int) -> list[LogEntry]:
        assert set(self.run.ends(*"abc").values()) == {0}
        assert_result(self.run, ranks)
        return self.run.log()

    def lost(self) -> list[str]:
        """Return the hosts that have reported lost contact."""
        return [name for name in "abc" if LOST in self.run.messages(name)]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Lab]]:
    monkeypatch.setenv("CKPT_TEST_EVERY", "1000000")
    with hosts_on_a_wire(4) as hosts:
        yield lambda *options, **more: Lab(hosts, tmp_path, *options, **more)


def failures(log: list[LogEntry]) -> list[LogEntry]:
    return [entry for entry in log if entry.kind == "failure"]


@pytest.mark.parametrize("position", [0, 1])
def test_a_host_that_is_cut_off_ends_its_own_ranks(lab: Callable[..., Lab], position: int) -> None:
    """It does so by itself, while the other hosts continue without it. When the connection is back it is a spare, and no step
    is lost."""
    one = lab("--min", "2", steps=600)
    one.start()
    victim = one.host_of(position)
    name, ranks = "abc"[victim], [2 * position, 2 * position + 1]
    pids = [one.run.pid(rank) for rank in ranks]
    one.hosts.unplug(victim)
    assert have_ended(pids)
    assert max(one.step(rank) for rank in ranks) < one.run.steps - 1, "the ranks have ended by themselves"
    until(lambda: one.lost() == [name])
    one.run.until(lambda log: len(starts(log)) == 2, "continued")
    one.run.until_step(12, attempt=1)
    one.hosts.plug(victim)
    log = one.ends_well(4)
    assert [(e.facts["cause"], e.facts["host"]) for e in failures(log)] == [("lost", name)]
    assert name not in starts(log)[-1]
    assert one.lost() == [name]


def test_a_host_without_a_replacement_rejoins_after_its_cut(lab: Callable[..., Lab]) -> None:
    one = lab("--min", "3", steps=600)
    one.start()
    victim = one.host_of(1)
    one.hosts.unplug(victim)
    until(lambda: one.lost() == ["abc"[victim]])
    one.run.until(lambda log: bool(failures(log)), "noticed")
    one.hosts.plug(victim)
    log = one.ends_well(6)
    assert starts(log)[0] == starts(log)[1]
    assert len(starts(log)) == 2


def test_all_hosts_restart_after_all_were_cut_off(lab: Callable[..., Lab]) -> None:
    """The attempt is still the newest one when the connections are back, and each host reports what it did: all ranks start
    again."""
    one = lab("--min", "2", steps=600)
    one.start()
    pids = [one.run.pid(rank) for rank in range(6)]
    for each in range(3):
        one.hosts.unplug(each)
    assert have_ended(pids)
    until(lambda: one.lost() == list("abc"))
    for each in range(3):
        one.hosts.plug(each)
    log = one.ends_well(6)
    assert {e.facts["cause"] for e in failures(log)} == {"lost"}
    assert any("had no contact with the run log or 2 other hosts" in e.text for e in failures(log))


def test_a_run_continues_while_etcd_accepts_and_does_not_answer(lab: Callable[..., Lab]) -> None:
    """The machine of etcd accepts connections, but no process answers them."""
    one = lab()
    one.start()
    stop(one.etcd.pid)
    time.sleep(3 * LOST_SECONDS)
    one.wait_for_steps(20)
    os.kill(one.etcd.pid, signal.SIGCONT)
    assert not failures(one.ends_well(6))
    assert not one.lost()


def test_a_run_continues_while_the_machine_of_etcd_is_cut_off(lab: Callable[..., Lab]) -> None:
    """All hosts reach each other: only the run log is unreachable."""
    one = lab()
    one.start()
    one.hosts.unplug(ETCD)
    time.sleep(3 * LOST_SECONDS)
    one.wait_for_steps(20)
    one.hosts.plug(ETCD)
    assert not failures(one.ends_well(6))
    assert not one.lost()


def test_a_host_stopped_beyond_its_lease_rejoins_as_it_wakes(lab: Callable[..., Lab]) -> None:
    """etcd and the network work as before. The other hosts have continued; the host has contact again as soon as it wakes."""
    one = lab("--min", "2", steps=600)
    one.start()
    victim = one.host_of(1)
    pids = one.hosts.processes(victim)
    assert len(pids) >= 4, "expected the agent, its orphan guard and two ranks"
    for pid in pids:
        stop(pid)
    one.run.until(lambda log: len(starts(log)) == 2, "continued")
    one.run.until_step(5, attempt=1)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    log = one.ends_well(4)
    assert [(e.facts["cause"], e.facts["host"]) for e in failures(log)] == [("lost", "abc"[victim])]
    assert not one.lost()


def test_a_host_that_reads_the_log_as_it_is_back_reports_the_lost_contact(lab: Callable[..., Lab]) -> None:
    """Its agent waits for etcd while its ranks are killed, and gets an answer: the others have continued without it."""
    one = lab("--min", "2", steps=600)
    one.start(failpoints="lease.probed=sleep:1.5@*")  # the agent asks etcd for at most 5 s at a time
    victim = one.host_of(1)
    pids = [one.run.pid(rank) for rank in (2, 3)]
    one.hosts.unplug(victim)
    assert have_ended(pids)
    one.hosts.plug(victim)
    one.run.until(lambda log: len(starts(log)) == 2, "continued")
    log = one.ends_well(2 * len(starts(one.run.log())[1]))
    assert [(e.facts["cause"], e.facts["host"]) for e in failures(log)] == [("lost", "abc"[victim])]
    # On a busy machine the pauses of this agent may be so long that its orphan guard ends the ranks first.
    assert one.lost() == ["abc"[victim]] or "this agent was stopped or hung" in one.run.messages("abc"[victim])


# --- host names that cannot be resolved -------------------------------------------------------------------------------


@pytest.fixture
def named(lab: Callable[..., Lab]) -> Iterator[Callable[..., tuple[Lab, Callable[[], None]]]]:
    """Hosts that reach etcd by a name, and a function that stops the name server: it does not answer then, for a while."""
    made: list[Path] = []

    def begin(*options: str) -> tuple[Lab, Callable[[], None]]:
        one = lab(*options, at=f"{NAME}:2379")
        for name in one.hosts.names[:3]:
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            made.append(folder)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{one.hosts.address(ETCD)} {NAME}\n")
            (folder / "resolv.conf").write_text(f"nameserver {one.hosts.network}.253\noptions timeout:30 attempts:1\n")
            (folder / "nsswitch.conf").write_text("hosts: files dns\n")
        return one, lambda: [(folder / "hosts").write_text("127.0.0.1 localhost\n") for folder in made] and None

    yield begin
    for folder in made:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_a_name_server_that_does_not_answer_ends_no_rank(named: Callable[..., tuple[Lab, Callable[[], None]]]) -> None:
    """A look-up takes longer than the lease. The addresses that are known already are used meanwhile."""
    one, forget = named()
    one.start()
    forget()
    pids = [one.run.pid(rank) for rank in range(6)]
    time.sleep(3 * LOST_SECONDS)
    one.wait_for_steps(20)
    assert all(processes.process_state(pid) for pid in pids)
    assert not one.lost()


def test_a_host_without_a_name_server_stays_in_the_run(named: Callable[..., tuple[Lab, Callable[[], None]]]) -> None:
    """Its reports arrive, so that the other hosts do not take it for lost."""
    one, _ = named("--min", "2")
    one.start()
    name = one.hosts.names[one.host_of(1)]
    (Path("/etc/netns") / name / "hosts").write_text("127.0.0.1 localhost\n")
    time.sleep(3 * LOST_SECONDS)
    one.wait_for_steps(20)
    assert not failures(one.run.log())


def test_a_host_cut_off_during_a_name_look_up_ends_its_ranks(named: Callable[..., tuple[Lab, Callable[[], None]]]) -> None:
    """A look-up of its agent takes 30 s: its ranks do not wait for it."""
    one, forget = named("--min", "2")
    one.start()
    victim = one.host_of(1)
    pids = [one.run.pid(rank) for rank in (2, 3)]
    forget()
    one.hosts.unplug(victim)
    until(lambda: not any(processes.process_state(pid) not in ("", "Z") for pid in pids))
    assert one.lost() in ([], ["abc"[victim]])
    one.hosts.plug(victim)
    until(lambda: one.lost() == ["abc"[victim]])


# --- reachable machines --------------------------------------------------------------------------------------------


def test_only_machines_that_do_not_answer_are_unreachable() -> None:
    """A machine with a closed port or with a server that never accepts answers; one without a connection does not."""
    with hosts_on_a_wire(3) as hosts:
        addresses = AddressCache()
        found = {i: addresses.look_up(hosts.address(i), 4000) for i in range(3)}
        assert all(len(each) == 1 for each in found.values())
        both = [address for each in found.values() for address in each]
        assert find_unreachable(both, 2.0) == frozenset()
        hosts.unplug(1)
        assert find_unreachable(both, 0.75) == frozenset(found[1])
        hosts.plug(1)
        until(lambda: find_unreachable(both, 0.75) == frozenset())
        assert addresses.look_up(hosts.here, 4000) == (), "this machine itself is among the addresses"
        assert addresses.look_up("127.0.0.1", 4000) == ()
        assert addresses.look_up("localhost", 4000) == ()
        assert addresses.look_up("no such name", 4000) == ()


def test_a_server_that_never_accepts_is_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        address = Address(socket.AF_INET, server.getsockname())
        assert find_unreachable([address] * 3, 0.5) == frozenset()
    assert find_unreachable([address], 0.5) == frozenset(), "a refused connection counts as unreachable"
