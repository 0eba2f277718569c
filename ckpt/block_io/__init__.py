"""Plan, read and verify blocks of a load, and the staging memory through which a save passes.

An error is raised for each block that does not match its digest, before the load returns. The package imports `format`, `state`
and `support`. Start with `read_plan`, then `block_reader`.
"""
