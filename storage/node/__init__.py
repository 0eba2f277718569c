"""A member behind the network: the server of a node, its client, and the messages between them.

Clients on the same host receive open file descriptors instead of bytes (`fd_passing_server`, `fd_passing_client`).

Guarantees: the server listens on loopback unless its caller names another address, and refuses each call without one of its
tokens, if it has any. `security_options` lists what callers must require beyond loopback. Used by all layers above `storage`;
it imports `member` and the packages below it. Start with `wire`, then `server`.
"""
