"""Fails if another distribution owns one of gaudiserve's top-level packages and would hide it.

Reads only package metadata and imports only the standard library, so that the build of an image can
run it.
"""

import sys
from importlib.metadata import Distribution, distributions

OURS = "gaudiserve"
PACKAGES = frozenset({"server", "engine", "hpu", "config"})


def top_level_names(distribution: Distribution) -> set[str]:
    """Top-level modules of a distribution, from top_level.txt or from its file list."""
    listed = (distribution.read_text("top_level.txt") or "").split()
    files = distribution.files or ()
    return set(listed) or {
        file.parts[0].removesuffix(".py") for file in files if file.suffix == ".py"
    }


def conflicts() -> list[str]:
    """Line for each distribution other than gaudiserve that owns one of its packages."""
    found = []
    for distribution in distributions():
        name = distribution.metadata["Name"]
        taken = sorted(top_level_names(distribution) & PACKAGES)
        if taken and name != OURS:
            found.append(f"{name} has a top-level package {', '.join(taken)}; uninstall {name}")
    return found


def main() -> int:
    """Print the conflicts on stderr; the exit status is 1 if there are any."""
    found = conflicts()
    for line in found:
        print(f"package_names: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
