"""The config of a run: TOML text into frozen, typed records.

Owns the options, their types, defaults, limits and one-line explanations. Must not know MPI, torch or any engine: a
config is read and checked on a login node in milliseconds.

    records   the sections as dataclasses, one field an option
    read      a file and `--set section.key=value` into one `Config`
    describe  every option with its default and meaning, as text
"""
