"""Which release of a library is installed: an older one cannot be the reference for everything."""

from importlib.metadata import version

from packaging.version import Version


def transformers_before(release: str) -> bool:
    """Whether the installed transformers is older than `release`."""
    return Version(version("transformers")) < Version(release)
