"""Groups the machines of a fleet into clusters."""
