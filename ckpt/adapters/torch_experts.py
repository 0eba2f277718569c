"""Global names and positions of the experts of a mixture (MoE) whose ranks have different experts under equal local names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.storage.base.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Experts:
    """How the experts of a model are divided among ranks, for `ModelState(experts={pattern: Experts(…)})`.

    group: the ranks among which the experts are divided in equal numbers, in the order of the group: a torch process group or a
        device mesh of one dimension. None if this process has all of them.
    copies: the ranks that have the same experts as this rank, as a process group or a mesh. "auto" derives them from `group` if
        that is a block of ranks, or every n-th rank, of the ranks that have the model. None means this rank alone.
    axis: the axis along which a tensor that contains all local experts is divided.
    """

    group: Any
    copies: Any = "auto"
    axis: int = 0


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor with one or several experts: its name and its part in the whole model."""

    name: str
    """The name of the tensor in the whole model."""
    copies: tuple[int, ...]
    """The ranks that have an equal tensor."""
    position: int = 0
    """Of a tensor with several experts: the position of this rank among those that divide them."""
    parts: int = 1
    """The number of those ranks; 1 for a tensor of one expert."""
    axis: int = 0

    def global_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in the whole model of a tensor of this shape."""
        return tuple(n * self.parts if axis == self.axis else n for axis, n in enumerate(shape))

    def offset(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the index in the whole tensor of the first element of this rank's part of it."""
        return tuple(n * self.position if axis == self.axis else 0 for axis, n in enumerate(shape))

    def is_divided(self, shape: Sequence[int], parameter: Sequence[int] | None) -> bool:
        """Return whether a tensor of this shape contains the local experts.

        parameter: the shape of the parameter to whose optimizer state the tensor belongs; None for the parameter itself.

        Factored moments of a stack of matrices have the axis of the stack, but one axis less than the parameter.
        """
        if self.parts == 1 or len(shape) <= self.axis:
            return False
        if parameter is None or tuple(shape) == tuple(parameter):
            return True
        return self.axis == 0 and len(parameter) >= 3 and len(shape) >= 2 and shape[0] == parameter[0]

    def local_shape(self, shape: Sequence[int], parameter: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that this rank has of a saved tensor of the optimizer state of a parameter."""
        if self.parts == 1 or len(shape) <= self.axis or shape[self.axis] != parameter[self.axis] * self.parts:
            return tuple(shape)
        local = tuple(parameter[self.axis] if axis == self.axis else n for axis, n in enumerate(shape))
        return local if self.is_divided(local, parameter) else tuple(shape)


@dataclass(frozen=True, slots=True)
class _Rule:
    """One pattern of ModelState(experts=)."""

    pattern: re.Pattern[str]
    ranks: tuple[int, ...]
    """The ranks that divide the experts, in the order of the experts."""
    position: int
    """That of this rank in `ranks`."""
    copies: tuple[int, ...] | None
    """None if they cannot be derived."""
    are_derived: bool
    """Whether the copies were derived from the group, rather than given."""
    axis: int

    def error(self, what: str) -> InvalidArgument:
        """Return the error for a model that the pattern does not fit. what: the reason, and what to do."""
        return InvalidArgument(f"ModelState: experts={{{self.pattern.pattern!r}: …}}: {what}")


class ExpertNames:
    """The `ExpertTensor` of each tensor of a model, by its local name and by its name in the whole model."""

    def __init__(self, experts: Mapping[str, object] | None, model_group: object) -> None:
        self._rules = [_rule(pattern, value, model_group) for pattern, value in (experts or {}).items()]
        self._by_local_name: dict[str, ExpertTensor | None] = {}
        self._by_name: dict[str, ExpertTensor] = {}

    def learn(self, names: Sequence[str]) -> None:
        """Find the expert tensors among the tensors of the model. One call gets the local names of all of them."""
        if not self._rules or all(name in self._by_local_name for name in names):
            return
        found = {name: next(((rule, m) for rule in self._rules if (m := _find(rule, name))), None) for name in names}
        numbers: dict[tuple[_Rule, str], set[int]] = {}
        for entry in found.values():
            if entry is not None and entry[1].number is not None:
                numbers.setdefault((entry[0], entry[1].before), set()).add(entry[1].number)
        self._by_local_name = {name: entry and _expert_tensor(*entry, name, numbers) for name, entry in found.items()}
        self._by_name = {tensor.name: tensor for tensor in self._by_local_name.values() if tensor is not None}

    def name(self, local_name: str) -> str:
        """Return the name in the whole model of a tensor with this local name."""
        tensor = self._by_local_name.get(local_name)
        return local_name if tensor is None else tensor.name

    def tensor(self, name: str) -> ExpertTensor | None:
        """Return the tensor with this name in the whole model; None if it is not of an expert."""
        return self._by_name.get(name)


@dataclass(frozen=True, slots=True)
class _Match:
    """Where the number of an expert is in a name, between `before` and `after`; None in a tensor of several experts."""

    before: str
    number: int | None
    after: str


def _find(rule: _Rule, name: str) -> _Match | None:
    """Return the position of the number of the expert: the first group of the pattern, or the number that follows a match."""
    found = False
    for match in rule.pattern.finditer(name):
        found = True
        if rule.pattern.groups:
            start, end = match.span(1)
        else:
            number = re.compile(r"\.?(\d+)(?=\.|$)").match(name, match.end())
            start, end = (-1, -1) if number is None else number.span(1)
        if start >= 0:
            if not name[start:end].isdecimal():
                raise rule.error(f"its group matches {name[start:end]!r} in {name}; let it match the number of the expert")
            return _Match(name[:start], int(name[start:end]), name[end:])
    return _Match(name, None, "") if found else None


def _expert_tensor(rule: _Rule, match: _Match, name: str, numbers: Mapping[tuple[_Rule, str], set[int]]) -> ExpertTensor:
    # A save compares copies of whole arrays, and so finds a wrong derivation; it does not compare parts of arrays.
    is_part = match.number is None and len(rule.ranks) > 1
    if rule.copies is None or (is_part and rule.are_derived and len(rule.copies) > 1):
        raise rule.error(
            f"the group does not show which ranks have copies of the experts of {name}; give Experts(group, copies=…) their "
            "process group"
        )
    if match.number is None:
        return ExpertTensor(name, rule.copies, rule.position, len(rule.ranks), rule.axis)
    mine = numbers[rule, match.before]
    count = len(mine)
    first = rule.position * count
    if mine == set(range(count)):
        return ExpertTensor(f"{match.before}{first + match.number}{match.after}", rule.copies)
    if mine == set(range(first, first + count)):  # the model already has the global numbers
        return ExpertTensor(name, rule.copies)
    raise rule.error(
        f"rank {rule.position} of {len(rule.ranks)} has the experts {sorted(mine)[:8]} of {match.before}…; number them from 0, "
        f"or by their numbers in the whole model, with {count} on each rank"
    )


def _rule(pattern: str, value: object, model_group: object) -> _Rule:
    given = value if isinstance(value, Experts) else Experts(value)
    ranks, mine = _ordered_ranks(given.group), own_rank()
    if mine not in ranks:
        raise InvalidArgument(
            f"ModelState: experts={{{pattern!r}: …}}: rank {mine} is not in the group of ranks {list(ranks)}; give the group "
            "of the ranks that divide the experts, with this rank"
        )
    position = ranks.index(mine)
    are_derived = isinstance(given.copies, str) and given.copies == "auto"
    if are_derived:
        copies = derived_copies(ranks, position, model_ranks(model_group))
    else:
        copies = ranks_of(given.copies)
        if mine not in copies:
            raise InvalidArgument(
                f"ModelState: experts={{{pattern!r}: …}}: rank {mine} is not among the copies, ranks {list(copies)}; give the "
                "group of the ranks that have the same experts as this rank"
            )
    return _Rule(re.compile(pattern), ranks, position, copies, are_derived, given.axis)


def derived_copies(group: Sequence[int], position: int, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """Return the ranks at the same position in the other groups of experts.

    group: the ranks of this group of experts. ranks: all ranks that have the model.

    If the group is a block of `ranks`, or every n-th of them, then `ranks` is a grid of which the group is one axis, as in
    Megatron, DeepSpeed and device meshes. None for any other group.
    """
    if len(group) == 1:
        return tuple(sorted(ranks))
    if not set(group) <= set(ranks):
        return None
    order = sorted(ranks)
    at = [order.index(rank) for rank in group]
    step, count = at[1] - at[0], len(at)
    if step <= 0 or at != list(range(at[0], at[0] + step * count, step)):
        return None
    if at[0] % (step * count) >= step or len(order) % (step * count):  # the group crosses the border of a block of the grid
        return None
    return tuple(
        order[start + position * step + inner] for start in range(0, len(order), step * count) for inner in range(step)
    )


def own_rank() -> int:
    """Return the rank of this process, 0 without torch.distributed."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks_of(group: object) -> tuple[int, ...]:
    """Return the ranks of a process group or device mesh in ascending order; for None, this rank alone."""
    return tuple(sorted(_ordered_ranks(group)))


def _ordered_ranks(group: object) -> tuple[int, ...]:
    """Return the ranks of a process group or device mesh in its order."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if group is None:
        return (own_rank(),)
    if isinstance(group, DeviceMesh):
        return tuple(group.mesh.reshape(-1).tolist())
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    raise InvalidArgument(f"ModelState: group={group!r}: give 'auto', None, a torch process group or a device mesh")


def model_ranks(group: object) -> tuple[int, ...]:
    """Return the ranks that have the model: for "auto", all."""
    import torch.distributed as dist

    if isinstance(group, str) and group == "auto":
        return tuple(range(dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1))
    return ranks_of(group)
