"""Tiers: faster stores in front of the repository of record, such as shared memory or a local disk.

Guarantee: a step is removed from a near tier only when a further tier has a verified copy. The package imports `saving`,
`training` and the packages below them. Start with `manager`; `copy_step` copies one step to a further tier, and
`background_copier` does so during training.
"""

from ckpt.tiers.memory_drain import drain as drain
