"""Fetches the page's JavaScript libraries from npm, as listed in server/page/vendor/packages.json.

To update a library, change its version in packages.json and run `make page-libraries`: the script
replaces the files and their SHA-256 digests. Imports only the standard library.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "server" / "page" / "vendor"
RECORD = VENDOR / "packages.json"
NPM_TIMEOUT_S = 120.0
SOURCE_MAP = b"//# sourceMappingURL="


def fetch(package: str, folder: Path) -> tarfile.TarFile:
    """Archive of a package, `name@version`; npm checks its integrity."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
    packed = subprocess.run(
        command, capture_output=True, text=True, timeout=NPM_TIMEOUT_S, check=True
    )
    return tarfile.open(folder / packed.stdout.split()[-1])


def without_source_map(content: bytes) -> bytes:
    """The script without its link to a source map, which the package does not have."""
    lines = [line for line in content.splitlines() if not line.startswith(SOURCE_MAP)]
    return b"\n".join(lines) + b"\n"


def main() -> None:
    """Replace every file that the record names."""
    record = json.loads(RECORD.read_text())
    for name, package in record.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            fetch(f"{name}@{package['version']}", Path(folder)) as archive,
        ):
            for file, facts in package["files"].items():
                member = archive.extractfile(f"package/{facts['from']}")
                if member is None:
                    sys.exit(f"{name} {package['version']} has no file {facts['from']}")
                content = without_source_map(member.read())
                (VENDOR / file).write_bytes(content)
                facts["sha256"] = hashlib.sha256(content).hexdigest()
        print(f"{name} {package['version']}")
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
