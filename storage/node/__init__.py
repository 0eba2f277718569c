"""A member behind the network: the server of a node, its client, and the messages between them.

Clients on the same host receive open file descriptors instead of bytes (`fd_passing_server`, `fd_passing_client`).

Guarantees: the server listens on loopback unless it is configured otherwise, and requires a token and TLS beyond it. Used by
all layers above `storage`; it imports `member` and the packages below it. Start with `wire`, then `server`.
"""
