"""The version of this distribution, which the package metadata reads, and the install command for
its extras; versions of other distributions."""

import importlib.metadata

VERSION = "0.2.0"


def installed_version(distribution: str) -> str:
    """Version of an installed distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def install_command(extras: str) -> str:
    """Command that installs these extras from the repository; the distribution is not on a package
    index."""
    return f"`pip install '.[{extras}]'` in the clone of gaudiserve"
