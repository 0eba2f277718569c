"""Calls to the members of a namespace that get lost."""

from __future__ import annotations

import random

from ckpt.aggregator.file_io.namespace import Namespace
from helpers.registers import Flaky


class LossyCalls:
    """Sets how often the calls to each member get lost; 1.0 disconnects it."""

    def __init__(self, namespace: Namespace, draw: random.Random) -> None:
        self._flaky = {name: Flaky(member.registers, draw, 0.0) for name, member in namespace.open_members.items()}
        for name, flaky in self._flaky.items():
            namespace.open_members[name].registers = namespace._member_registers[name] = flaky

    def set(self, member: str, rate: float) -> None:
        """Let a member lose this share of the calls to it."""
        self._flaky[member].rate = rate
