"""Code that does not depend on checkpoints: validation of options, Arrow columns, the Python runtime.

Of ckpt, it imports only `storage.base`, and all packages of ckpt may import it. Start with `validation`, which rejects a wrong
option before anything is read or written.
"""
