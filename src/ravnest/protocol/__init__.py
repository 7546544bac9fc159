"""Messages on every wire, one module per conversation."""
