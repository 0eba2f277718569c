"""Code that knows nothing of checkpoints: validation of options, columns of Arrow, the Python runtime.

It imports none of the other packages of ckpt, and all of them may import it. Start with `validation`, which refuses a wrong
option before anything is read or written.
"""
