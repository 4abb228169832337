"""Value of PT_HPU_RECIPE_CACHE_CONFIG, where the vendor's runtime stores compiled recipes. The
runtime reads the variable at its first import, and fails if the value has an invalid form.

Valid forms by release (HabanaAI/gaudi-pytorch-bridge, recipe_cache_config.cpp and
env_flags_impl.cpp):

    path                  all releases
    path,delete,MB        up to 1.21; a later state of the sources refuses it
    path,delete,MB,nfs    from 1.22 on
"""

import os
import re
from collections.abc import Mapping

RECIPE_CACHE_CONFIG = "PT_HPU_RECIPE_CACHE_CONFIG"
RECIPE_CACHE_MB = 8192

FOUR_FIELDS = (1, 22)
"""First release with a fourth field (the default that its log shows). A script of the vendor had to
drop the field for 1.21 (HabanaAI/vllm-fork, commit 54ebc728)."""
REFUSED_CHARACTERS = re.compile(r"""[\s,"'\\<>|&;$%*?\[\]{}^~`]""")
"""Characters of a path that later releases refuse, and the comma, which separates fields."""


def recipe_cache_config(folder: str, release: str) -> str:
    """Value of the variable that keeps the recipes in `folder`, for a runtime of `release` (empty
    if unknown: then the size is the runtime's default). Empty for a path with characters that later
    releases refuse."""
    # Later releases refuse a symbolic link.
    path = os.path.realpath(folder)
    if REFUSED_CHARACTERS.search(path):
        return ""
    known = _number_of(release)
    if not known:
        return path
    return f"{path},false,{RECIPE_CACHE_MB}" + (",false" if known >= FOUR_FIELDS else "")


def refused_form(text: str, release: str) -> str:
    """Why a runtime of `release` refuses the value `text` of the variable; empty if the runtime
    takes the value, or if the release is unknown."""
    fields, known = text.split(","), _number_of(release)
    if not known:
        return ""
    if known < FOUR_FIELDS:
        if len(fields) > 3:
            return f"it has {len(fields)} fields, release {release} takes at most 3"
        return ""
    if len(fields) not in (1, 4):
        return f"it has {len(fields)} fields, releases from 1.22 on take 1 or 4"
    if found := REFUSED_CHARACTERS.search(fields[0]):
        return f"later releases refuse the character {found[0]!r} in its path"
    if os.path.islink(fields[0]):
        return "later releases refuse a symbolic link as its path"
    return ""


def keeps_recipes(variables: Mapping[str, str]) -> str:
    """Path of the recipe folder in `variables`; empty if there is no folder, or if the runtime
    deletes its recipes at start."""
    words = variables.get(RECIPE_CACHE_CONFIG, "").split(",")
    deletes = len(words) > 1 and words[1].strip().lower() in ("true", "1")
    return "" if deletes else words[0]


def _number_of(release: str) -> tuple[int, ...]:
    """(major, minor) of a release; empty if unknown."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else ()
