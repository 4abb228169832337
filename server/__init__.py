"""API servers, offline API and commands. Importing this package checks that the packages engine,
hpu and config are gaudiserve's."""

import importlib.util
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent


def _check_packages(home: Path) -> None:
    for name in ("engine", "hpu", "config"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"gaudiserve's package {name!r} is missing, it belongs in {home}")
        locations = [Path(p).resolve() for p in (spec.submodule_search_locations or ())]
        if home / name not in locations:
            origin = spec.origin or ", ".join(map(str, locations))
            raise ImportError(
                f"gaudiserve's package {name!r} is hidden by {origin}: a script that uses "
                f"gaudiserve must not lie beside its own {name}.py, and no other package may own "
                f"that name"
            )


_check_packages(_HOME)
