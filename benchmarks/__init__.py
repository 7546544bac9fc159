"""Benchmarks, each against a baseline in the same run: `python -m benchmarks.NAME`."""

from __future__ import annotations
