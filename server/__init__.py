"""The guard: this package runs only beside its own engine, hpu and config. Knows nothing else."""

import importlib.util
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent


def _refuse_strangers(home: Path) -> None:
    """Raise ImportError if one of the other three floors would be imported from elsewhere."""
    for name in ("engine", "hpu", "config"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"gaudiserve's package {name!r} is missing, it belongs in {home}")
        places = [Path(p).resolve() for p in (spec.submodule_search_locations or ())]
        if home / name not in places:
            found = spec.origin or ", ".join(map(str, places))
            raise ImportError(
                f"gaudiserve's package {name!r} is hidden by {found}: a script that uses "
                f"gaudiserve must not lie beside its own {name}.py, and no other package may own "
                f"that name"
            )


_refuse_strangers(_HOME)
