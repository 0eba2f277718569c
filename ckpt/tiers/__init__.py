"""Tiers: faster stores in front of the repository of record, such as shared memory or a local disk.

Guarantees: no sweep deletes a step that waits to be copied to a further tier, and memory is freed at the end of a job only if
the repository of record has the newest step. Other steps expire by the Keep of their tier, whether or not a copy exists.
Each block is verified before it is copied. Used by `checkpointer`, `adapters` and `recovery`; it imports `saving`, `training`
and the packages below them. Start with `manager`; `copy_step` copies one step to a further tier, and `background_copier` does
so during training.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.tiers.memory_drain import drain as drain


def __getattr__(name: str) -> Any:
    """Import `drain` at its first use: `ckpt-run` imports this package for the folder of the memory alone."""
    if name == "drain":
        from ckpt.tiers.memory_drain import drain

        return drain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
