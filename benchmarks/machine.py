"""Description of the machine of a measurement."""

import os
import platform
from pathlib import Path

EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""CPU extensions that speed up matrix products."""


def machine() -> str:
    """Processor, cores, EXTENSIONS, load, system and Python."""
    facts = Path("/proc/cpuinfo").read_text()
    names = [line.split(":")[1].strip() for line in facts.splitlines() if "model name" in line]
    extensions = ", ".join(name for name in EXTENSIONS if f" {name}" in facts)
    return (
        f"{names[0] if names else 'unknown processor'}, {os.cpu_count()} cores"
        f"{f' ({extensions})' if extensions else ''}, load {os.getloadavg()[0]:.1f}, "
        f"{platform.system()}, Python {platform.python_version()}"
    )
