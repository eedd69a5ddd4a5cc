"""MPI is loaded here, so that the rules of tests/conftest.py see how many ranks there are."""

from mpi4py import MPI

__all__ = ["MPI"]
