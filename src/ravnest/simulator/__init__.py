"""Simulates plans on a virtual clock, with the schedule of the workers and the repair policy of the coordinator.

simulate(task, plan, duration_s=600)     predicted samples/s, bubbles, staleness, memory
timeline(simulation)                     the recorded time for ui.perfetto.dev
"""

from ravnest.simulator.results import Simulation, timeline
from ravnest.simulator.simulation import Fault, FaultTrace, SimulationSettings, draw_faults, simulate

__all__ = ["Fault", "FaultTrace", "Simulation", "SimulationSettings", "draw_faults", "simulate", "timeline"]
