"""The folder that `ckpt-run --adapt` puts on PYTHONPATH. Python runs its `sitecustomize` before a script."""
