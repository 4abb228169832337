"""The version of this distribution, which the package metadata reads, and the install command of
its extras."""

VERSION = "0.1.0"


def install_command(extras: str) -> str:
    """Command that installs these extras. No package index has this distribution."""
    return f"`pip install '.[{extras}]'` in the clone of gaudiserve"
