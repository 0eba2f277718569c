"""One member of a namespace: objects and registers together, in a folder (`device`) or a bucket (`bucket`).

Guarantees: the contracts of a store and of registers, for both kinds of member. Used by `node` and all layers above `storage`;
it imports `base`, `local`, `remote` and `registers`. Start with `device`.
"""
