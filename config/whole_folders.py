"""Cached folders that are written once: detects missing and truncated files, and replaces damaged
folders."""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from config.json_text import parse_json

logger = logging.getLogger(__name__)

_SIZES = ".sizes.json"
"""File with the sizes of the other files."""


def is_whole(folder: Path, unlisted: Sequence[str] = ()) -> bool:
    """Whether `folder` has all files with the sizes that they had in `place_folder`: a cleaner may
    have removed files, or a full disk truncated them. `unlisted`: files that a folder made by an
    earlier version must have to count as complete: such folders list no file sizes."""
    try:
        sizes = parse_json((folder / _SIZES).read_bytes())
        return isinstance(sizes, dict) and sizes.items() <= _sizes(folder).items()
    except FileNotFoundError:
        return bool(unlisted) and all((folder / name).is_file() for name in unlisted)
    except (OSError, ValueError):
        return False


def place_folder(fresh: Path, target: Path) -> None:
    """Write the list of file sizes into the folder `fresh`, and move the folder to `target`, which
    must be missing or damaged. Raises OSError."""
    write_json(fresh / _SIZES, _sizes(fresh))
    replace_folder(fresh, target)


def replace_folder(fresh: Path, target: Path) -> None:
    """Move the folder `fresh` to `target`, which must be missing or damaged. Raises OSError."""
    if os.path.lexists(target):
        logger.warning("%s is damaged, and is made again", target)
        remove(target)
    fresh.rename(target)


def remove(path: Path) -> None:
    """Remove a folder with its contents, or a file; `path` may be missing. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, and flush it to disk, so that a later rename of its folder cannot reach
    the disk before the content. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file in `folder`, by relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}
