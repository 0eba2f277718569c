"""Code that does not depend on checkpoints: validation of options, Arrow columns, the Python runtime.

Guarantees: `validation` rejects a wrong option before anything is read or written. Used by `state`, `training` and
the packages above them; of ckpt, it imports only `storage.base`. Start with `validation`.
"""
