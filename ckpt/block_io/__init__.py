"""Plan, read and verify blocks of a load, and the staging memory through which a save passes.

Guarantees: a block that does not match its digest raises an error before the load returns. Used by `repository` and the
packages above it; it imports `format` and the packages below it. Start with `read_plan`, then `block_reader`.
"""
