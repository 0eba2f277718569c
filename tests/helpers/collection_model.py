"""A model of clients that write and delete one file while its tombstone is collected, over the rules of the product.

A writer, a deleter and a collector change the register of one path on three members. Each may stop at any moment, permanently
or until after anything else. Requests may arrive at any later time or never. What a member does follows from the rules of
`storage/registers`; which value a proposer chooses, from `aggregator/records/register_update.py`; which registers are
collected, and what the log of collected names says, from `tombstone_collection.py` and `collected_tombstones.py`.

The value of the register is the list of the changes that made it: the number of a writer, or `d` for the deletion. The list
begins anew where the register was collected. These promises are checked in every state:

* Whoever reads now from any quorum finds each acknowledged write that was not deleted.
* A file that was deleted, and the deletion acknowledged, does not come back.
* Of two acknowledged values, one continues the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from ckpt.aggregator.records import register_update, replica_set
from ckpt.aggregator.records.collected_tombstones import CollectionLog
from ckpt.aggregator.records.replica_set import ReplicaSet
from ckpt.aggregator.records.tombstone_collection import has_different_values, is_collectable
from ckpt.storage.registers.base import (
    NO_BALLOT,
    Ballot,
    DirectChange,
    Register,
    RegisterValue,
    can_propose_directly,
    floor_ballot,
)
from ckpt.storage.registers.fence_numbers import next_era, order_key
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
    text_of,
    voting_group,
    write_quorums,
)

MEMBERS = ("a", "b", "c")
FIRST_NUMBER = 1
DELETED = b"d"
_DELETER, _COLLECTOR = 8, 9
"""The numbers of these clients; writers have lower ones."""


class Client(NamedTuple):
    """A client. fence: the fence number of its calls. unsettled: the one under which a member may have accepted its change."""

    number: int
    phase: str = "idle"
    fence: int = FIRST_NUMBER
    tries: int = 0
    answers: tuple[tuple[str, Any], ...] = ()
    ballot: Ballot = NO_BALLOT
    proposed: bytes = b""
    may_be_accepted: bool = False
    unsettled: int = 0
    checked: int = 0
    is_absent: bool = False


class Request(NamedTuple):
    """A call on its way to a member. stage: the phase and try of the client that waits for its answer."""

    client: int
    stage: tuple[str, int, int]
    member: str
    call: tuple[Any, ...]


class World(NamedTuple):
    """A state of the model. history: all acknowledged changes. collected: the lengths of its parts that may be collected."""

    members: tuple[tuple[str, MemberState], ...]
    clients: tuple[Client, ...]
    requests: frozenset[Request] = frozenset()
    log: CollectionLog = CollectionLog(0, ())
    history: bytes = b""
    collected: frozenset[int] = frozenset()
    error: str = ""


class CollectionModel(Model[World]):
    """The states of such clients and members.

    writers: how many clients write. history: what was done before, acknowledged and on all members. round: that of its ballot.
    has_deleter: whether a client deletes the file. is_stopped: whether the first writer was stopped after its change, which
    others have seen. is_direct: whether writers try a direct change first. tries: how often a client begins a two-phase change
    anew. late: the most requests that may still arrive after their client has continued.
    """

    def __init__(
        self,
        writers: int,
        *,
        history: bytes = b"",
        round: int = 1,
        has_deleter: bool = False,
        is_stopped: bool = False,
        is_direct: bool = True,
        tries: int = 0,
        late: int = 1,
    ) -> None:
        self._writers, self._history, self._round, self._has_deleter = writers, history, round, has_deleter
        self._is_stopped, self._is_direct, self._tries, self._late = is_stopped, is_direct, tries, late

    def initial(self) -> World:
        record = None
        if self._history:
            ballot = Ballot(self._round, "earlier")
            record = Register(ballot, ballot, RegisterValue(self._history))
        members = tuple((name, MemberState(record, FIRST_NUMBER, True)) for name in MEMBERS)
        clients = [*map(Client, range(self._writers)), *[Client(_DELETER)] * self._has_deleter, Client(_COLLECTOR)]
        if self._is_stopped:
            clients[0] = clients[0]._replace(phase="spread", may_be_accepted=True, proposed=b"0")
        return World(members, tuple(clients), history=self._history)

    def error(self, state: World) -> str:
        if state.error:
            return state.error
        members, replicas = dict(state.members), _replicas(0)
        answers = {m: answer_of(members[m]) for m in MEMBERS}
        for voters in write_quorums(replicas):
            found = log_of(replicas.newest(replica_set.undamaged_records({m: answers[m] for m in voters})))
            if _history_with(state, found) is None:
                return f"{','.join(voters)} return {text_of(found)}, but {text_of(state.history)} was acknowledged"
        return ""

    def successors(self, state: World) -> Iterator[tuple[Step, World]]:
        for step, after in self._all_steps(state):
            awaited, late = _requests_that_matter(after)
            for kept in combinations(late, min(len(late), self._late)):
                yield step, after._replace(requests=awaited.union(kept))

    def _all_steps(self, state: World) -> Iterator[tuple[Step, World]]:
        for request in state.requests:
            yield self._deliver(state, request)
        for at, client in enumerate(state.clients):
            if client.phase == "idle":
                for fence in {FIRST_NUMBER, *(each.fence for _, each in state.members)}:
                    after = self._begin(state, at, client._replace(fence=fence))
                    if after.clients[at].phase != "failed":
                        yield ("begin", client.number, fence), after
            elif client.phase not in ("done", "failed"):
                for after in self._go_on(state, at, client):
                    if after.clients[at].phase != "failed":
                        yield (client.phase, client.number, "ends with", client.answers), after

    def _deliver(self, state: World, request: Request) -> tuple[Step, World]:
        members = dict(state.members)
        members[request.member], answer = execute(members[request.member], request.call)
        after = state._replace(members=tuple(members.items()), requests=state.requests - {request})
        client = state.clients[request.client]
        if request.stage != _stage(client):
            return (request.call[0], client.number, request.member, "nobody waits for the answer"), after
        answered = client._replace(answers=tuple(sorted([*client.answers, (request.member, answer)])))
        return (request.call[0], client.number, request.member, answer), _with_client(after, request.client, answered)

    # --- clients -----------------------------------------------------------------------------------------------

    def _go_on(self, state: World, at: int, client: Client) -> Iterator[World]:
        answers = dict(client.answers)
        if client.number == _COLLECTOR:
            yield self._collect(state, at, client, answers)
        elif OUTDATED in answers.values():
            yield from self._with_later_number(state, at, client)
        else:
            yield getattr(self, f"_after_{client.phase}")(state, at, client, answers)

    def _begin(self, state: World, at: int, client: Client) -> World:
        """Begin a change, as `ReplicatedRegisters.update_fenced` does, or a collection."""
        client = client._replace(is_absent=False)
        if client.number == _COLLECTOR:
            if any(order_key(each.fence) > order_key(client.fence) for _, each in state.members):
                return _with_client(state, at, client._replace(phase="failed"))
            listed = {name: answer_of(each) for name, each in state.members}  # in one step, so that the model is small
            return self._collect(state, at, client._replace(phase="list"), listed)
        if not self._is_direct or client.number == _DELETER:
            return self._prepare(state, at, client, floor_ballot(client.fence))
        return _send(state, at, client._replace(phase="propose"), MEMBERS[:1], ("read", client.fence))

    def _with_later_number(self, state: World, at: int, client: Client) -> Iterator[World]:
        """Continue with a later fence number, as `_PublicationState` in `aggregator/file_io/publication.py`."""
        unsettled = client.unsettled or (client.fence if client.may_be_accepted else 0)
        for fence in {each.fence for _, each in state.members}:
            if order_key(fence) > order_key(client.fence):
                again = client._replace(fence=fence, unsettled=unsettled, may_be_accepted=False)
                yield self._begin(state, at, again)

    def _after_propose(self, state: World, at: int, client: Client, answers: dict[str, Any]) -> World:
        record = answers.get(MEMBERS[0])
        if not isinstance(record, Register):
            return self._prepare(state, at, client, floor_ballot(client.fence))
        client, new = _decide(client, record.value)
        if new is None or not can_propose_directly(record, client.fence):
            return self._prepare(state, at, client, floor_ballot(client.fence))
        call = ("change", DirectChange(PATH, record.accepted_ballot, new), f"w{client.number}", client.fence)
        client = client._replace(phase="change", proposed=new.head, ballot=record.accepted_ballot)
        return _send(state, at, client, MEMBERS[:1], call)

    def _after_change(self, state: World, at: int, client: Client, answers: dict[str, Any]) -> World:
        client = client._replace(may_be_accepted=client.may_be_accepted or answers.get(MEMBERS[0]) is not False)
        if not answers.get(MEMBERS[0]):
            return self._prepare(state, at, client, floor_ballot(client.fence))
        change = DirectChange(PATH, client.ballot, RegisterValue(client.proposed))
        call = ("change", change, f"w{client.number}", client.fence)
        return _send(state, at, client._replace(phase="spread"), MEMBERS[1:], call)

    def _after_spread(self, state: World, at: int, client: Client, answers: dict[str, Any]) -> World:
        if _replicas(0).can_write({MEMBERS[0], *(m for m, yes in answers.items() if yes)}):
            return self._acknowledge(state, at, client, client.proposed)
        return self._prepare(state, at, client, floor_ballot(client.fence))

    def _prepare(self, state: World, at: int, client: Client, above: Ballot) -> World:
        ballot = Ballot(above.round + 1, f"p{client.number}.{client.tries}.{client.fence}")
        return _send(state, at, client._replace(phase="prepare", ballot=ballot), MEMBERS, ("prepare", ballot, client.fence))

    def _after_prepare(self, state: World, at: int, client: Client, answers: dict[str, Any]) -> World:
        replicas, decided = _replicas(client.fence), [client]

        def decide(_: str, value: RegisterValue | None) -> RegisterValue | None:
            decided[0], new = _decide(client, value)
            return new

        if not replicas.can_write(replica_set.undamaged_records(answers)):
            return self._retry(state, at, client, NO_BALLOT)
        update = register_update.RegisterUpdate(decide)
        proposals, _, highest = register_update.choose_values({PATH: replicas}, {PATH: answers}, client.ballot, update)
        client = decided[0]
        if PATH in update.found:
            return self._found_nothing(state, at, client)
        if PATH not in proposals:
            return self._retry(state, at, client, highest)
        value = proposals[PATH].value
        client = client._replace(phase="accept", proposed=value.head, may_be_accepted=True)
        return _send(state, at, client, MEMBERS, ("accept", value, client.ballot, client.fence))

    def _after_accept(self, state: World, at: int, client: Client, answers: dict[str, Any]) -> World:
        if _replicas(0).can_write({m for m, yes in answers.items() if yes}):
            return self._acknowledge(state, at, client, client.proposed)
        return self._retry(state, at, client, client.ballot)

    def _found_nothing(self, state: World, at: int, client: Client) -> World:
        """Continue a client that found no record and proposed none: it was never published, or was deleted and collected."""
        if not client.is_absent:
            return _with_client(state, at, client._replace(phase="done", answers=()))
        if state.log.may_have(PATH, client.unsettled):
            return _with_client(state, at, client._replace(phase="failed", answers=()))  # its outcome can't be known
        return self._begin(state, at, client._replace(checked=client.fence, tries=client.tries + 1))

    def _retry(self, state: World, at: int, client: Client, above: Ballot) -> World:
        client = client._replace(tries=client.tries + 1)
        if client.tries > self._tries:
            return _with_client(state, at, client._replace(phase="failed", answers=()))
        return self._prepare(state, at, client, max(above, floor_ballot(client.fence)))

    def _acknowledge(self, state: World, at: int, client: Client, value: bytes) -> World:
        state = _with_client(state, at, Client(client.number, "done"))
        if client.number == _DELETER and not value.endswith(DELETED):
            return state  # there was nothing to delete
        return _with_agreed(state, value)

    # --- the collector, as `aggregator/records/tombstone_collection.py` -----------------------------------------

    def _collect(self, state: World, at: int, client: Client, answers: dict[str, Any]) -> World:
        failed = _with_client(state, at, client._replace(phase="failed", answers=()))
        if len(answers) < len(MEMBERS) or OUTDATED in answers.values():
            return failed
        if client.phase == "list":
            newest = max(answers.values(), key=lambda r: r.accepted_ballot)
            if has_different_values(answers) or not (newest.value is None or log_of(newest).endswith(DELETED)):
                return failed
            above = max(max(r.promised_ballot.round, r.accepted_ballot.round) for r in answers.values())
            number = next_era(client.fence, above)
            assert number is not None
            client = client._replace(phase="fence", fence=number, ballot=newest.accepted_ballot, proposed=log_of(newest))
            return _send(state, at, client, MEMBERS, ("fence", number))
        if client.phase == "fence":
            if client.ballot != NO_BALLOT:
                state = state._replace(log=state.log.with_collection(client.fence, [PATH]))
            return _send(state, at, client._replace(phase="confirm"), MEMBERS, ("read", client.fence))
        if client.phase == "confirm":
            if not is_collectable(answers, client.ballot, MEMBERS):
                return failed
            if client.ballot != NO_BALLOT:  # all members have the tombstone, or had it: the deletion is agreed
                state = _with_agreed(state, client.proposed)
                ends = {start + len(client.proposed) for start in _starts_in_history(state, client.proposed)}
                state = state._replace(collected=state.collected | ends)
            client = client._replace(phase="collect", answers=())
            sent = {Request(at, _stage(client), m, ("collect", answers[m].accepted_ballot, client.fence)) for m in MEMBERS}
            return _with_client(state, at, client)._replace(requests=state.requests | sent)
        return _with_client(state, at, client._replace(phase="done", answers=()))


def _decide(client: Client, value: RegisterValue | None) -> tuple[Client, RegisterValue | None]:
    """Return the client, and the new value or None to keep it: for a writer as `_PublicationState`, else as `Deletion`."""
    log = b"" if value is None else value.head
    if client.number == _DELETER:
        return client, RegisterValue(log + DELETED) if log and not log.endswith(DELETED) else None
    own = b"%d" % client.number
    is_absent = client.unsettled != 0 and value is None and client.checked != client.fence
    client = client._replace(is_absent=is_absent)
    return client, None if is_absent or own in log else RegisterValue(log + own)


def _history_with(state: World, value: bytes) -> bytes | None:
    """Return the history continued by what a value has more; None if the value lacks a change or brings one back."""
    if value.startswith(state.history):
        return value
    for end in state.collected:
        before, since = state.history[:end], state.history[end:]
        if value.startswith(since) and not set(value) & (set(before) - set(DELETED)):
            return before + value
    return None


def _with_agreed(state: World, value: bytes) -> World:
    """Return the state after a client has learned that this value was agreed."""
    if (history := _history_with(state, value)) is not None:
        return state._replace(history=history)
    if _starts_in_history(state, value):  # it learns late what others have continued
        return state
    return state._replace(error=f"both {text_of(value)} and {text_of(state.history)} were agreed")


def _starts_in_history(state: World, value: bytes) -> list[int]:
    """Return where in the history the register had this value."""
    return [start for start in {0, *state.collected} if state.history.startswith(value, start)]


def _replicas(number: int) -> ReplicaSet:
    return ReplicaSet((voting_group(MEMBERS),), number)


def _stage(client: Client) -> tuple[str, int, int]:
    return client.phase, client.tries, client.fence


def _send(state: World, at: int, client: Client, members: tuple[str, ...], call: tuple[Any, ...]) -> World:
    client = client._replace(answers=())
    sent = {Request(at, _stage(client), member, call) for member in members}
    return _with_client(state, at, client)._replace(requests=state.requests | sent)


def _with_client(state: World, at: int, client: Client) -> World:
    return state._replace(clients=(*state.clients[:at], client, *state.clients[at + 1 :]))


def _requests_that_matter(state: World) -> tuple[frozenset[Request], list[Request]]:
    """Return the requests for whose answers clients wait, and those of the others that can still change something."""
    members = dict(state.members)
    awaited = frozenset(r for r in state.requests if r.stage == _stage(state.clients[r.client]))
    return awaited, [r for r in state.requests - awaited if not is_without_effect(members[r.member], r.call)]
