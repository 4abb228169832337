"""Keeps the vendor's torch on a Gaudi machine: finds it, pins it for pip, and reports a
replacement.

Reads only package metadata: it imports neither torch nor a module of this project.
"""

import sys
from importlib.metadata import distributions, version
from importlib.util import find_spec

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
    if "torch" not in installed():
        return f"{sys.executable} has no torch; start from a Gaudi PyTorch image or installation"
    if find_spec("habana_frameworks") is None:
        return (
            f"{sys.executable} has torch {installed()['torch']}, but no habana_frameworks: that is "
            "not the vendor's build, and installing over it would not make it one"
        )
    return None


def main(arguments: list[str]) -> int:
    """Run `check`, `constraints` or `same FILE`; returns 1 and prints the reason on stderr if a
    check fails."""
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
    else:
        problem = "usage: vendor_torch.py check | constraints | same FILE"
    if problem is not None:
        print(f"vendor_torch: {problem}", file=sys.stderr)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
