"""One place that keeps bytes: the contract of a store, the stores themselves, members of a namespace, and nodes.

A store promises that an object is visible only when it is whole and durable, as far as the system below can promise that; each
store says what it can't. This layer imports nothing of the others, and all of them may use it.

Start with `base.store`, the contract. `urls` turns a URL into a store, and `testing` is the contract as a test suite.
"""
