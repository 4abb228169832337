"""Keeps a Gaudi machine's own torch: finds it, pins it for pip, and tells when it was replaced.

Knows only package metadata: it imports neither torch nor anything of ours.
"""

import sys
from importlib.metadata import distributions, version
from importlib.util import find_spec

KEPT = (
    *("torch", "habana-torch-plugin", "numpy"),
    # Compiled against the vendor's torch.
    *("torchvision", "torchaudio"),
    # Faster than Pillow, whose files pip would write over it in the same folder.
    "pillow-simd",
)


def installed() -> dict[str, str]:
    """The versions of those packages whose vendor build must stay."""
    present = {
        distribution.metadata["Name"].lower().replace("_", "-") for distribution in distributions()
    }
    return {name: version(name) for name in KEPT if name in present}


def overwritten() -> str | None:
    """What is wrong if Pillow lies in the folder of Pillow-SIMD: both write the package PIL."""
    folders = {}
    for distribution in distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        if name in ("pillow", "pillow-simd"):
            folders[name] = str(distribution.locate_file(""))
    if len(folders) == 2 and len(set(folders.values())) == 1:
        return f"pillow was installed over pillow-simd in {folders['pillow']}"
    return None


def missing() -> str | None:
    """Why this Python cannot run on Gaudi; None if it can."""
    if "torch" not in installed():
        return f"{sys.executable} has no torch; start from a Gaudi PyTorch image or installation"
    if find_spec("habana_frameworks") is None:
        return (
            f"{sys.executable} has torch {installed()['torch']}, but no habana_frameworks: that is "
            "not the vendor's build, and installing over it would not make it one"
        )
    return None


def main(arguments: list[str]) -> int:
    """`check`, `constraints` or `same FILE`; 1 and a sentence on stderr if something is wrong."""
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
