"""Places before the repository of record that are nearer and faster: shared memory, a local disk.

It promises that a step is removed from a near tier only when a further one has it, verified. It imports `saving`, `training`
and what is below. Start with `manager`; `copy_step` copies one step to a further tier, `background_copier` does so during
training.
"""

from ckpt.tiers.manager import drain as drain
