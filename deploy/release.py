"""Checks that a git tag equals the version of this tree, and that CHANGELOG.md has an entry for it.
Prints `version=...` for a workflow, and on failure one line with the necessary change.

Imports only the standard library: it runs before anything is installed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problem(tag: str, version: str, changelog: str) -> str:
    """Reason why `tag` cannot be released; empty if it can."""
    if tag != f"v{version}":
        return f"the tag is {tag}, and VERSION in config/version.py is {version}: tag v{version}"
    if not re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE
    ):
        return (
            f"CHANGELOG.md has no entry `## [{version}] - DATE`: move the unreleased entries there"
        )
    return ""


def main() -> int:
    (tag,) = sys.argv[1:]
    source = (ROOT / "config" / "version.py").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (version,) = re.findall(r'^VERSION = "(.+)"$', source, re.MULTILINE)
    found = problem(tag, version, changelog)
    if found:
        print(found, file=sys.stderr)
        return 1
    print(f"version={version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
