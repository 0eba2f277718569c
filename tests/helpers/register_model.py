"""A model of clients that change one record while its replica set is replaced, over the rules of the product.

Members, messages and clients are values. A request may be delivered at any later time or never, also after its client has
continued, and its reply may be lost. A client continues at any time with the answers that it has, as after a timeout. What a
member does follows from the rules of `storage/registers/base.py` and `fence_numbers.py`. Which value a proposer chooses, and
what is a quorum, follows from `aggregator/records/register_update.py` and `replica_set.py`.

The value of the record is the list of the changes that made it. These promises are checked in every state:

* An acknowledged value has all changes that were acknowledged before its change began.
* Of any two acknowledged values, one continues the other.
* Whoever reads now from any quorum finds all changes that were acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpt.aggregator.records import register_update, replica_set
from ckpt.aggregator.records.replica_set import ReplicaSet
from ckpt.storage.registers.base import (
    NO_BALLOT,
    Ballot,
    DirectChange,
    Register,
    RegisterValue,
    can_propose_directly,
)
from helpers.model_checking import Model
from helpers.register_members import (
    OUTDATED,
    PATH,
    MemberState,
    Step,
    answer_of,
    execute,
    is_without_effect,
    log_of,
    read_quorums,
    text_of,
    voting_group,
)

LISTING = "scan"
"""The call by which the mover lists a member: it fences the member first."""
_LEAVING = "a"
"""The member that leaves the replica set; `d` joins it."""


class Rings(NamedTuple):
    """The replica sets of the path: before, during and after the replacement of a member."""

    old: ReplicaSet
    moving: ReplicaSet
    moved: ReplicaSet


RINGS = Rings(
    ReplicaSet((voting_group("abc"),), 1),
    ReplicaSet((voting_group("abc"), voting_group("bcd")), 2),
    ReplicaSet((voting_group("bcd"),), 3),
)


Members = tuple[tuple[str, MemberState], ...]


class Client(NamedTuple):
    """One client: a writer that appends its number to the value, or the mover, which replaces the member."""

    phase: str
    ring: int = 0
    tries: int = 0
    answers: tuple[tuple[str, Any], ...] = ()
    ballot: Ballot = NO_BALLOT
    proposed: bytes = b""
    floor: bytes = b""
    damaged: tuple[str, ...] = ()
    """The members whose records were damaged in the first phase."""
    accepting: tuple[str, ...] = ()
    """The members that have accepted the value before the damaged ones were asked."""


class Request(NamedTuple):
    """A call on its way to a member. stage: the phase and try of the client that waits for its answer."""

    client: int
    stage: tuple[str, int]
    member: str
    call: tuple[Any, ...]


class World(NamedTuple):
    """A state of the model. agreed: the longest acknowledged value. delays: how many requests got no answer in time."""

    members: Members
    clients: tuple[Client, ...]
    requests: frozenset[Request]
    ring: int = 0
    agreed: bytes = b""
    error: str = ""
    delays: int = 0


class RegisterModel(Model[World]):
    """The states of such clients and members.

    writers: how many clients append. movers: how many clients replace the member meanwhile. The first one begins. Each other
    one completes what was begun. is_killed: whether the first one has died then, with its requests. tries: how often a client
    begins anew before it gives up. is_direct: whether writers try a direct change first. lossy: whether replies can be lost of
    calls that take effect. value: the first value. delays: the most requests whose clients continue without an answer; None for
    any number.
    """

    _rings = RINGS

    def __init__(
        self,
        writers: int,
        *,
        movers: int = 0,
        tries: int = 0,
        is_direct: bool = True,
        lossy: bool = False,
        value: bytes = b"",
        delays: int | None = None,
        is_killed: bool = False,
    ) -> None:
        self._writers, self._movers, self._tries, self._is_direct, self._lossy = writers, movers, tries, is_direct, lossy
        self._value, self._delays, self._is_killed = value, delays, is_killed

    def initial(self) -> World:
        record = None
        if self._value:
            ballot = NO_BALLOT.next_step("w0")
            record = Register(ballot, ballot, RegisterValue(self._value))
        members = {name: MemberState(record, 1, True) for name in "abc"}
        if self._movers:
            members["d"] = MemberState(None, 0, False)
        clients = [*[Client("idle")] * self._writers, *[Client("move"), *[Client("complete")] * self._movers][: self._movers]]
        return World(tuple(members.items()), tuple(clients), frozenset(), agreed=self._value)

    def error(self, state: World) -> str:
        if state.error:
            return state.error
        members, replicas = dict(state.members), self._rings[state.ring]
        answers = {m: answer_of(members[m]) for m in replicas.members}
        for voters in read_quorums(replicas):
            records = replica_set.undamaged_records({m: answers[m] for m in voters})
            if replicas.can_read(records) and not (found := log_of(replicas.newest(records))).startswith(state.agreed):
                return f"{','.join(voters)} return {text_of(found)}, but {text_of(state.agreed)} was acknowledged"
        return ""

    def successors(self, state: World) -> Iterator[tuple[Step, World]]:
        for step, after in self._all_steps(state):
            if self._delays is not None:
                late = sum(_is_late(state, after, request) for request in after.requests)
                after = after._replace(delays=after.delays + late)
                if after.delays > self._delays:
                    continue
            yield step, self.without_useless_requests(after)

    def without_useless_requests(self, state: World) -> World:
        """Return a state without the requests that nobody waits for and that can't change anything any more."""
        members = dict(state.members)
        return state._replace(
            requests=frozenset(
                r for r in state.requests if _is_awaited(state, r) or not is_without_effect(members[r.member], r.call)
            )
        )

    def _all_steps(self, state: World) -> Iterator[tuple[Step, World]]:
        for request in state.requests:
            yield from self._deliver(state, request)
        for number, client in enumerate(state.clients):
            if client.phase == "idle":
                for ring in {0, state.ring}:  # what a client knows of the ring may be old
                    begun = client._replace(ring=ring, floor=state.agreed)
                    yield ("idle", number, f"begins in ring {ring}"), self._begin(state, number, begun)
            # A client that fails does no more than one that waits forever.
            elif (
                client.phase not in ("done", "failed")
                and (after := self._go_on(state, number)).clients[number].phase != "failed"
            ):
                yield (client.phase, number, "ends with", client.answers), after

    # --- members -----------------------------------------------------------------------------------------------

    def _deliver(self, state: World, request: Request) -> Iterator[tuple[Step, World]]:
        members = dict(state.members)
        before = members[request.member]
        after_call, answer = execute(before, request.call)
        members[request.member] = after_call
        after = state._replace(members=tuple(members.items()), requests=state.requests - {request})
        is_awaited = _is_awaited(state, request)
        if is_awaited:
            client = state.clients[request.client]
            answered = client._replace(answers=tuple(sorted([*client.answers, (request.member, answer)])))
            yield (request.call[0], request.client, request.member, answer), _with_client(after, request.client, answered)
        if not is_awaited or (self._lossy and after_call != before):
            yield (request.call[0], request.client, request.member, "nobody gets the answer"), after

    # --- clients -----------------------------------------------------------------------------------------------

    def _go_on(self, state: World, number: int) -> World:
        client = state.clients[number]
        if any(answer == OUTDATED for _, answer in client.answers):
            return self._begin(state, number, client._replace(ring=state.ring, tries=client.tries + 1))
        return getattr(self, f"_after_{client.phase}")(state, number, client, dict(client.answers))  # type: ignore[no-any-return]

    def _begin(self, state: World, number: int, client: Client) -> World:
        """Begin the change of a client under the ring that it knows."""
        if client.tries > self._tries:
            return _with_client(state, number, client._replace(phase="failed", answers=()))
        if number >= self._writers:  # the mover
            replicas = self._rings.old if client.ring == 1 else self._rings.moved
            call = (LISTING, self._rings[client.ring].fence_number)
            return self._send(state, number, client._replace(phase="scan"), replicas.members, call)
        replicas = self._rings[client.ring]
        if len(replicas.groups) > 1 or not self._is_direct:
            return self._prepare(state, number, client)
        call = ("read", replicas.fence_number)
        return self._send(state, number, client._replace(phase="propose"), replicas.members[:1], call)

    def _after_propose(self, state: World, number: int, client: Client, answers: dict[str, Any]) -> World:
        replicas = self._rings[client.ring]
        record = answers.get(replicas.members[0])
        new = self._decide(number, record.value) if isinstance(record, Register) else None
        if new is None or not can_propose_directly(record, replicas.fence_number):
            return self._prepare(state, number, client)
        call = ("change", DirectChange(PATH, record.accepted_ballot, new), f"w{number}", replicas.fence_number)
        changing = client._replace(phase="change", proposed=new.head, ballot=record.accepted_ballot)
        return self._send(state, number, changing, replicas.members[:1], call)

    def _after_change(self, state: World, number: int, client: Client, answers: dict[str, Any]) -> World:
        replicas = self._rings[client.ring]
        if not answers.get(replicas.members[0]):
            return self._prepare(state, number, client)
        change = DirectChange(PATH, client.ballot, RegisterValue(client.proposed))
        call = ("change", change, f"w{number}", replicas.fence_number)
        return self._send(state, number, client._replace(phase="spread"), replicas.members[1:], call)

    def _after_spread(self, state: World, number: int, client: Client, answers: dict[str, Any]) -> World:
        replicas = self._rings[client.ring]
        if replicas.can_write({replicas.members[0], *(m for m, yes in answers.items() if yes)}):
            return self._acknowledge(state, number, client)
        return self._prepare(state, number, client)

    def _prepare(self, state: World, number: int, client: Client, above: Ballot = NO_BALLOT) -> World:
        ballot = Ballot(above.round + 1, f"p{number}.{client.tries}")
        replicas = self._rings[client.ring]
        call = ("prepare", ballot, replicas.fence_number)
        begun = client._replace(phase="prepare", ballot=ballot, damaged=(), accepting=())
        return self._send(state, number, begun, replicas.members, call)

    def _after_prepare(self, state: World, number: int, client: Client, answers: dict[str, Any]) -> World:
        replicas = self._rings[client.ring]
        update = register_update.RegisterUpdate(lambda _, value: self._decide(number, value))
        undamaged, damaged = replica_set.undamaged_records(answers), replica_set.damaged_members(answers)
        if not replicas.can_agree(undamaged, damaged):
            return self._retry(state, number, client, NO_BALLOT)
        proposals, _, highest = register_update.choose_values({PATH: replicas}, {PATH: answers}, client.ballot, update)
        if PATH in update.found:  # there is no value, and the mover makes none
            return self._acknowledge(state, number, client._replace(proposed=b""))
        if PATH not in proposals:
            return self._retry(state, number, client, highest)
        value = proposals[PATH].value
        call = ("accept", value, client.ballot, replicas.fence_number)
        accepting = client._replace(phase="accept", proposed=value.head, damaged=tuple(sorted(damaged)))
        return self._send(state, number, accepting, replicas.members, call)

    def _after_accept(self, state: World, number: int, client: Client, answers: dict[str, Any]) -> World:
        replicas, accepting = self._rings[client.ring], {m for m, yes in answers.items() if yes}
        if client.damaged and replicas.can_agree(accepting, client.damaged):
            call = ("restore", RegisterValue(client.proposed), client.ballot, replicas.fence_number)
            restoring = client._replace(phase="restore", accepting=tuple(sorted(accepting)))
            return self._send(state, number, restoring, client.damaged, call)
        return self._after_restore(state, number, client._replace(accepting=tuple(sorted(accepting))), {})

    def _after_restore(self, state: World, number: int, client: Client, answers: dict[str, Any]) -> World:
        if self._rings[client.ring].can_write({*client.accepting, *(m for m, yes in answers.items() if yes)}):
            return self._acknowledge(state, number, client)
        return self._retry(state, number, client, client.ballot)

    def _retry(self, state: World, number: int, client: Client, above: Ballot) -> World:
        client = client._replace(tries=client.tries + 1)
        if client.tries > self._tries:
            return _with_client(state, number, client._replace(phase="failed", answers=()))
        return self._prepare(state, number, client, above)

    def _acknowledge(self, state: World, number: int, client: Client) -> World:
        value, error = client.proposed, ""
        if number >= self._writers:
            return self._move_is_settled(state, number, client)
        if not value.startswith(client.floor):
            error = f"writer {number} got {text_of(value)}, but {text_of(client.floor)} was acknowledged before it began"
        elif not value.startswith(state.agreed) and not state.agreed.startswith(value):
            error = f"both {text_of(value)} and {text_of(state.agreed)} were acknowledged"
        agreed = max(value, state.agreed, key=len)
        done = _with_client(state, number, Client("done"))
        return done._replace(agreed=agreed, error=error)

    def _decide(self, number: int, value: RegisterValue | None) -> RegisterValue | None:
        log, own = b"" if value is None else value.head, b"%d" % number
        if number >= self._writers or own in log:  # the mover keeps the value, and a writer recognises its own change
            return None
        return RegisterValue(log + own)

    def _send(self, state: World, number: int, client: Client, members: Any, call: tuple[Any, ...]) -> World:
        client = client._replace(answers=())
        stage = (client.phase, client.tries)
        sent = {Request(number, stage, member, call) for member in members}
        return _with_client(state, number, client)._replace(requests=state.requests | sent)

    # --- the mover, as `aggregator/records/ring_change.py` -----------------------------------------------------

    def _after_move(self, state: World, number: int, client: Client, _: Any) -> World:
        members = dict(state.members)
        # join_ring: it forgets earlier records, is fenced, and votes
        members["d"] = MemberState(None, 2, True)
        state = state._replace(members=tuple(members.items()), ring=1)
        return self._send(state, number, client._replace(phase="fence", ring=1), self._rings.old.members, ("fence", 2))

    def _after_complete(self, state: World, number: int, client: Client, _: Any) -> World:
        if state.ring == 0:  # nothing was begun yet
            return _with_client(state, number, client._replace(phase="failed"))
        if self._is_killed:
            dead = Client("failed")
            clients = tuple(dead if self._writers <= at < number else each for at, each in enumerate(state.clients))
            requests = frozenset(r for r in state.requests if not self._writers <= r.client < number)
            state = state._replace(clients=clients, requests=requests)
        if state.ring == 2:
            return _with_client(state, number, client._replace(phase="done"))
        return self._send(state, number, client._replace(phase="fence", ring=1), self._rings.old.members, ("fence", 2))

    def _after_fence(self, state: World, number: int, client: Client, answers: dict[str, Any]) -> World:
        if not self._is_fenced(answers):
            return _with_client(state, number, client._replace(phase="failed", answers=()))
        return self._begin(state, number, client)

    def _after_scan(self, state: World, number: int, client: Client, answers: dict[str, Any]) -> World:
        group = self._rings[client.ring].groups[0]  # its members have all records
        if sum(m not in answers for m in group.members) >= group.quorum.write:
            return _with_client(state, number, client._replace(phase="failed", answers=()))
        if all(not isinstance(r, Register) or r == Register() for r in answers.values()):  # no member lists the path
            return self._move_is_settled(state, number, client)
        return self._prepare(state, number, client)

    def _move_is_settled(self, state: World, number: int, client: Client) -> World:
        moved = state._replace(ring=2)
        return self._send(moved, number, client._replace(phase="unfence", ring=2), self._rings.old.members, ("fence", 3))

    def _after_unfence(self, state: World, number: int, client: Client, answers: dict[str, Any]) -> World:
        if not self._is_fenced(answers):
            return _with_client(state, number, client._replace(phase="failed", answers=()))
        state = self._send(state, number, client._replace(phase="forget"), self._rings.moved.members, ("fence", 3))
        drop = Request(number, ("forget", client.tries), _LEAVING, ("drop", 3))
        return state._replace(requests=state.requests | {drop})

    def _after_forget(self, state: World, number: int, client: Client, _: Any) -> World:
        return _with_client(state, number, client._replace(phase="done", answers=()))

    def _is_fenced(self, answers: dict[str, Any]) -> bool:
        group = self._rings.old.groups[0]
        return len(group.members) - len(answers) < min(group.quorum.write, group.quorum.read)


def _is_late(before: World, after: World, request: Request) -> bool:
    """Return whether its client waited for the answer of a request, and has continued without it."""
    return _is_awaited(before, request) and not _is_awaited(after, request)


def _is_awaited(state: World, request: Request) -> bool:
    client = state.clients[request.client]
    return request.stage == (client.phase, client.tries)


def _with_client(state: World, number: int, client: Client) -> World:
    return state._replace(clients=(*state.clients[:number], client, *state.clients[number + 1 :]))
