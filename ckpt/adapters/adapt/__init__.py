"""What `ckpt-run --adapt` does in a script that knows nothing of ckpt.

`startup` runs at the start of Python. It wraps a method of each framework after the import of that framework. The other files
are what these methods then call, one for each framework.

Guarantees: `startup` needs only the standard library, and imports no framework that the script does not import. Used by
`ckpt-run` (`tools`), which puts `startup` on PYTHONPATH. Start with `startup.hooks`.
"""
