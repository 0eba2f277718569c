"""Helpers of the training loop: a rank's heartbeat page, its losses, the save interval, the data position.

Guarantee: nothing here makes a training step wait. The package imports `groups`, and from `saving` only the handle. Start with
`heartbeat_page`, which users import as `ckpt.pulse`, and `data_loader`, which they import as `ckpt.data`.
"""
