"""Group machines into clusters."""
