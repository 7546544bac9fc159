"""Benchmark of failures and recovery, on the testbed."""
