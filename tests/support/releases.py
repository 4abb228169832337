"""Release of an installed library: older releases are no reference for some features."""

from importlib.metadata import version

from packaging.version import Version


def transformers_before(release: str) -> bool:
    """Whether the installed transformers is older than `release`."""
    return Version(version("transformers")) < Version(release)
