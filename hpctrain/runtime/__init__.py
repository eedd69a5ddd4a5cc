"""The runtime: joins engines and backends into a running job.

Owns the start of a process (context), what it was promised (launch), how it ends (abort, signals), its share of the
node (threads) and one training step (step). It is the only room that knows both engines and backends. It must not
know the command line, configuration files or data sets. Importing this package loads nothing heavy.
"""
