"""Files of the vendor's graph compiler, which finds them by environment variables. Its packages set
the variables in /etc/profile.d/habanalabs.sh, which only login shells read. Without them no
operation can be compiled: each fails with status 26 and an empty log."""

from collections.abc import Mapping
from pathlib import Path

GC_KERNEL_PATH = "GC_KERNEL_PATH"

COMPILER_FILES = {
    GC_KERNEL_PATH: "usr/lib/habanalabs/libtpc_kernels.so",
    "HABANA_PLUGINS_LIB_PATH": "opt/habanalabs/habana_plugins",
    "HABANA_SCAL_BIN_PATH": "opt/habanalabs/engines_fw",
}
"""Variable -> path below the root at which the vendor's packages install its file or folder."""


def compiler_variables(given: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """The variables in COMPILER_FILES that `given` lacks or holds empty, and whose file or folder
    is installed."""
    return {
        name: f"/{path}"
        for name, path in COMPILER_FILES.items()
        if not given.get(name) and (root / path).exists()
    }
