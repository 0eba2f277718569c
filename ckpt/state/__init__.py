"""What a user saves: a tree of containers and plain values, and the arrays in it as named leaves.

Guarantees: a state that was flattened and rebuilt has the same arrays and plain values, bit for bit, and for each object its
state; a value that cannot be stored raises an error that names its path; this package reads and writes no file. Used by
`format` and the packages above it; of ckpt, it imports only `support`, `errors` and `storage.base`. Start with `tree.flatten`.
`leaves` has one file for each framework, and `boxes` has the arithmetic of sharded arrays.
"""
