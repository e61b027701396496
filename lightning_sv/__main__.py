"""`python -m lightning_sv`: the command `lightning-sv`."""

from lightning_sv.cli.main import COMMANDS, cli, main

__all__ = ["COMMANDS", "cli", "main"]

if __name__ == "__main__":
    cli()
