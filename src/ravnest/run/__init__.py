"""The requester's process: drives a job from data to model."""
