"""What this machine can do: usable memory, training speed, and the line to a peer."""
