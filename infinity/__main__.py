"""`python -m infinity` is the command `infinity`."""

from infinity.cli.main import app

if __name__ == "__main__":
    app(prog_name="infinity")
