"""What stands beside the training loop: the heartbeat page of a rank, its losses, when to save, and its place in the data.

It promises to cost a training step no wait. It imports `groups`, and of `saving` only the handle. Start with `heartbeat_page`,
which users import as `ckpt.pulse`, and `data`, which they import as `ckpt.data`.
"""
