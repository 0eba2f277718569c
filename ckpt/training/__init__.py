"""Helpers of the training loop: the heartbeat page of a rank, its losses, the save interval, and the position in the data.

Guarantee: nothing here makes a training step wait. The package imports `groups`, and from `saving` only the handle. Start with
`heartbeat_page`, which users import as `ckpt.pulse`, and `data`, which they import as `ckpt.data`.
"""
