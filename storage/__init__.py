"""One place for bytes: the contract of a store, the stores, the members of a namespace, and nodes.

Guarantees: an object is visible only when it is complete and durable, as far as the system below can promise that; each store
documents what it can't. Used by all other layers; it imports none of them.

Start with `base.store`, the contract. `urls` turns a URL into a store, and `testing` is the contract as a test suite.
"""
