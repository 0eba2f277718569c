"""One place for bytes: the contract of a store, the stores, the members of a namespace, and nodes.

A store promises that an object is visible only when it is complete and durable, as far as the system below can promise that;
each store documents what it can't. This layer imports no other layer, and all others may import it.

Start with `base.store`, the contract. `urls` turns a URL into a store, and `testing` is the contract as a test suite.
"""
