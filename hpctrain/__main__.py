"""`python -m hpctrain`: the same as the command `hpctrain`."""

from hpctrain.cli.main import app

if __name__ == "__main__":
    app(prog_name="hpctrain")
