"""The command `gaudiserve`: main.py, a file or folder for each subcommand, and files that several
subcommands share."""
