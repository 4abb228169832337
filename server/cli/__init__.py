"""The command `gaudiserve`: main.py, and one file for each subcommand."""
