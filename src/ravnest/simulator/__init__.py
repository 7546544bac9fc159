"""Simulates plans on a virtual clock, with the schedule of the workers and the repair policy of the coordinator.

simulate(task, plan, duration_s=600)                    predicted samples/s, bubbles, staleness, memory
timeline(simulation)                                    the recorded time for ui.perfetto.dev
"""

from ravnest.simulator.faults import Fault, FaultTrace, draw_faults
from ravnest.simulator.results import Simulation
from ravnest.simulator.simulation import SimulationSettings, simulate
from ravnest.simulator.timeline import timeline

__all__ = ["Fault", "FaultTrace", "Simulation", "SimulationSettings", "draw_faults", "simulate", "timeline"]
