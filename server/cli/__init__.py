"""The command `gaudiserve` and its subcommands; main.py dispatches to them."""
