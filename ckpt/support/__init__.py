"""Code that does not depend on checkpoints: validation of options, Arrow columns, the Python runtime.

It imports none of the other packages of ckpt, and all of them may import it. Start with `validation`, which rejects a wrong
option before anything is read or written.
"""
