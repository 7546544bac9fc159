"""What everything stands on: ids, configuration, errors, clock. Imports nothing of ours."""
