"""Keeps the vendor's torch on a Gaudi machine: finds it, pins it for pip, and reports a missing or
replaced build.

Reads only package metadata: it imports neither torch nor a module of this project.
"""

import sys
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path

KEPT = (
    *("torch", "habana-torch-plugin", "numpy"),
    # Compiled against the vendor's torch.
    *("torchvision", "torchaudio"),
    # Faster than Pillow, which pip would install over it in the same folder.
    "pillow-simd",
)


def installed() -> dict[str, str]:
    """Versions of the installed packages whose vendor build must stay."""
    present = {
        distribution.metadata["Name"].lower().replace("_", "-") for distribution in distributions()
    }
    return {name: version(name) for name in KEPT if name in present}


def overwritten() -> str | None:
    """Error message if Pillow was installed over Pillow-SIMD, whose package is also PIL; otherwise
    None."""
    folders = {}
    for distribution in distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        if name in ("pillow", "pillow-simd"):
            folders[name] = str(distribution.locate_file(""))
    if len(folders) == 2 and len(set(folders.values())) == 1:
        return f"pillow was installed over pillow-simd in {folders['pillow']}"
    return None


def missing() -> str | None:
    """Reason why this Python cannot use a Gaudi; None if it can."""
    if find_spec("habana_frameworks") is not None and "torch" in installed():
        return None
    if "torch" not in installed():
        problem = f"{sys.executable} has no torch"
    else:
        problem = (
            f"{sys.executable} has torch {installed()['torch']}, which is not the vendor's build, "
            "and no habana_frameworks"
        )
    if is_closed(Path(sys.prefix)):
        return (
            f"{problem}: {sys.prefix} is an environment without the system's packages; if it is "
            "the .venv of `make install` or `make serve`, run `make clean`, then `make install-hpu`"
        )
    return f"{problem}: start from a Gaudi PyTorch image or installation"


def is_closed(prefix: Path) -> bool:
    """Whether `prefix` is a virtual environment that does not see the system's packages."""
    try:
        lines = (prefix / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return "include-system-site-packages=false" in (line.replace(" ", "") for line in lines)


def vendor_needed(root: Path) -> str | None:
    """Reason why `.venv` must be created by `make install-hpu`; None on a machine without a Gaudi.
    `root`: `/`, except in tests."""
    # Nodes of newer and older drivers (config/loading/cards.py). dev/accel also contains
    # accelerators of other vendors.
    nodes = [
        f"/dev/accel/{node.name}"
        for node in sorted(root.glob("dev/accel/accel[0-9]*"))
        if _pci_vendor(root / "sys/class/accel" / node.name) in ("0x1da3", None)
    ]
    nodes += [f"/dev/{node.name}" for node in sorted(root.glob("dev/hl[0-9]*"))]
    if nodes:
        found = f"this machine has Gaudi cards ({nodes[0]})"
    elif find_spec("habana_frameworks") is not None:
        found = f"{sys.executable} has habana_frameworks, the Gaudi runtime"
    else:
        return None
    return (
        f"{found}: run `make install-hpu` first, or for a server on the CPU `python3 -m venv .venv`"
    )


def _pci_vendor(device: Path) -> str | None:
    try:
        return (device / "device/vendor").read_text(encoding="ascii").strip()
    except OSError:
        return None


def main(arguments: list[str]) -> int:
    """Run `check`, `constraints`, `same FILE` or `not-needed [ROOT]`; returns 1 and prints the
    reason on stderr if a check fails."""
    command = arguments[0] if arguments else ""
    pins = "".join(f"{name}=={number}\n" for name, number in installed().items())
    if command == "check":
        problem = missing()
    elif command == "constraints":
        print(pins, end="")
        problem = None
    elif command == "same" and len(arguments) == 2:
        with open(arguments[1], encoding="utf-8") as file:
            before = file.read()
        problem = overwritten() if before == pins else f"was\n{before}and is now\n{pins}"
    elif command == "not-needed" and len(arguments) <= 2:
        problem = vendor_needed(Path(*(arguments[1:] or "/")))
    else:
        problem = "usage: vendor_torch.py check | constraints | same FILE | not-needed [ROOT]"
    if problem is not None:
        print(f"vendor_torch: {problem}", file=sys.stderr)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
