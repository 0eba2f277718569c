"""What `ckpt-run --adapt` does in a script that knows nothing of ckpt.

`startup` runs at the start of Python and needs only the standard library. It wraps a method of each framework after the import
of that framework. The other files are what these methods then call, one for each framework. Start with `startup.hooks`.
"""
