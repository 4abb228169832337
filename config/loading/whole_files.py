"""Files that other processes read while they are written."""

import os
from pathlib import Path


def write_whole(path: str, content: bytes) -> None:
    """Write or replace a file: whoever reads it has all of one content. Raises OSError."""
    partial = f"{path}.partial"
    Path(partial).write_bytes(content)
    os.replace(partial, path)
