"""The version of this distribution, which the package metadata reads, and the install command for
its extras."""

VERSION = "0.2.0"


def install_command(extras: str) -> str:
    """Command that installs these extras from the repository; the distribution is not on a package
    index."""
    return f"`pip install '.[{extras}]'` in the clone of gaudiserve"
