"""What a user saves: a tree of containers and plain values, and the arrays in it as named leaves.

It promises that a state which was flattened and built again is the same, value for value, or that it is refused by name. It
reads and writes no file, and imports only `support`. Start with `tree.flatten`; `leaves` has one file for each framework, and
`boxes` the arithmetic of sharded arrays.
"""
