"""Benchmarks of the planner and the simulator."""
