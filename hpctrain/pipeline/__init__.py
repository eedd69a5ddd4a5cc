"""Runs schedules. Owns the executor; knows nothing of torch, MPI or how a schedule was made."""
