"""The model of clients that change one record, for two members of which one loses its disk at any time."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt.aggregator.records.replica_set import ReplicaSet
from helpers.register_members import MemberState, Step, voting_group
from helpers.register_model import RegisterModel, Rings, World

_RING = ReplicaSet((voting_group("ab"),), 1)


class DiskLossModel(RegisterModel):
    """The states of writers and of two members. Each change needs both members; a read needs one.

    The member that loses its disk starts again without records, and does not remember what it had promised.
    """

    _rings = Rings(_RING, _RING, _RING)

    def initial(self) -> World:
        world = super().initial()
        return world._replace(members=tuple((name, member) for name, member in world.members if name in "ab"))

    def successors(self, state: World) -> Iterator[tuple[Step, World]]:
        if all(member.is_complete for _, member in state.members):
            for lost, _ in state.members:
                members = tuple((n, MemberState(None, 0, False) if n == lost else m) for n, m in state.members)
                yield ("loss", lost), state._replace(members=members)
        yield from super().successors(state)

    def without_useless_requests(self, state: World) -> World:
        """Keep all requests before the loss: one that a promise makes useless may take effect once that promise is lost."""
        if all(member.is_complete for _, member in state.members):
            return state
        return super().without_useless_requests(state)
