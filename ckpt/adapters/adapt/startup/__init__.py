"""The folder that `ckpt-run --adapt` puts on PYTHONPATH.

Python runs its `sitecustomize` before each script, which loads `hooks` from the same folder.

Guarantees: both need only the standard library, and import nothing of ckpt, because the Python of a script may lack it. Used by
`ckpt-run` (`tools`). Start with `hooks`.
"""
