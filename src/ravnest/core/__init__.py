"""Foundation modules without dependencies on the rest of Ravnest: schedule, metrics, clock, host, ids, units."""
