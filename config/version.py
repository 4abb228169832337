"""The version of this distribution, which the package metadata reads from here, and how its extras
are installed."""

VERSION = "0.1.0"


def install_command(extras: str) -> str:
    """What installs these extras: no package index has this distribution."""
    return f"`pip install '.[{extras}]'` in the clone of gaudiserve"
