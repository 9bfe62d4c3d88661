"""Pairs of configurations, a run and the run that resumes it: see `pairs`."""
