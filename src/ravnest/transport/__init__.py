"""Links that carry messages between stages, over unix sockets and mutual TLS."""
