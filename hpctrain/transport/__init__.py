"""Transports: the Transport contract, one file a way to move bytes between ranks.

Owns messages and memory that suits them. Knows no array library, does no arithmetic, and has never heard of the engines
that use it.
"""
