"""The commands: ckpt-inspect and ckpt-restore."""
