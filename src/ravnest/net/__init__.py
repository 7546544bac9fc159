"""Links over which stages exchange messages: in memory, over unix sockets, over mutual TLS."""
