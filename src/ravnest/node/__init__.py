"""The agent of a node: membership in a run, and supervision of its worker process."""
