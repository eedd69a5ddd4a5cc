"""The command line: `hpctrain train | plan | data | ckpt | bench | doctor`, one file a command.

Owns words, options and tables for people. Must not know how anything is done. Each command imports what it needs when
it runs: `hpctrain --help` loads neither torch nor MPI.
"""
