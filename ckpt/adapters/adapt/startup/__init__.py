"""The folder that `ckpt-run --adapt` puts on PYTHONPATH.

Python runs its `sitecustomize` before each script, which loads `hooks` from the same folder. Both need only the standard
library, and import nothing of ckpt: the Python of a script may lack it. Start with `hooks`.
"""
