"""Hooks of mkdocs.yml: files outside docs/ that pages link to become part of the site.

A file such as benchmarks/README.md has the address repository/benchmarks/README/ there.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")
FOLDER = "repository/"


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that pages link to, and the files that those files link to."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = set(pages)
    while pages:
        page = pages.pop()
        text = (ROOT / page).read_text(encoding="utf-8")
        for _, link, _ in LINK.findall(text):
            path = _path(page, link)
            if path in known or path.startswith("docs/") or not (ROOT / path).is_file():
                continue
            known.add(path)
            file = File.generated(config, FOLDER + path, abs_src_path=str(ROOT / path))
            files.append(file)
            if path.endswith(".md"):
                pages.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite relative links to addresses of the site. Links to missing files stay broken."""
    uri = page.file.src_uri
    path = uri.removeprefix(FOLDER) if uri.startswith(FOLDER) else f"docs/{uri}"

    def rewritten(found: re.Match[str]) -> str:
        target = _path(path, found[2])
        target = target.removeprefix("docs/") if target.startswith("docs/") else FOLDER + target
        return found[1] + posixpath.relpath(target, posixpath.dirname(uri) or ".") + found[3]

    return LINK.sub(rewritten, markdown)


def _path(page: str, link: str) -> str:
    """Path of a link's target in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
