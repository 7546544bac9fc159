"""Foundation modules that do not depend on the rest of Ravnest: schedule, metrics, clock, config, host, ids, units."""
