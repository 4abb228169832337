"""The only reader of environment variables: which settings they give, and what a worker needs set.

Knows names and words; what a word means is told by config/loading/sources.py.
"""

import difflib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping

from config.engine import EngineConfig
from config.errors import ConfigError
from config.execution import ModeChoice, choose_mode
from config.loading.flags import ACCEPTED, FILE_FLAGS, FLAGS, variable_of

PREFIX = "GAUDISERVE_"

RECIPE_CACHE_MB = 8192

# What Kubernetes puts into every pod for a service called gaudiserve, or gaudiserve-anything.
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
_SERVICE_ADDRESS = re.compile(r"^(tcp|udp|sctp)://")


def environment() -> Mapping[str, str]:
    """The variables of this process, as they are now."""
    return dict(os.environ)


def variable_table() -> dict[str, str]:
    """Every variable that is read as a setting, and the flag it stands for. Those that come first
    win: our own name, then the names a setting has elsewhere."""
    table = {flag.variable: flag.key for flag in FLAGS}
    names = [name for flag in FLAGS for name in flag.names[1:]]
    table.update({variable_of(name): name for name in (*names, *FILE_FLAGS, *ACCEPTED)})
    for flag in FLAGS:
        table.update(flag.setting.switch_variables)
        table.update(dict.fromkeys(flag.setting.variables, flag.key))
    return table


def settings(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(name, word, variable) of each setting found, the variable that wins last.

    An empty variable is one that is not set, but for a secret: an empty key would open the server.
    Raises ConfigError for a GAUDISERVE_ variable that is no setting, with the nearest that is.
    """
    table = variable_table()
    secrets = {name for flag in FLAGS if flag.setting.is_secret for name in flag.names}
    for variable, word in environ.items():
        if variable.startswith(PREFIX) and variable not in table:
            _refuse_unknown(variable, word, table)
    found = []
    for variable in reversed(table):
        word = environ.get(variable, "")
        if variable in environ and not word and table[variable] in secrets:
            raise ConfigError(f"{variable} is set but empty; unset it, or put a key into it")
        if variable == "OMP_NUM_THREADS":
            # One number a nesting level; ours is the outermost.
            word = word.split(",")[0]
        if word and not _is_service_link(variable, word):
            found.append((table[variable], word, variable))
    return found


def _refuse_unknown(variable: str, word: str, table: Mapping[str, str]) -> None:
    if _is_service_link(variable, word):
        return
    near = difflib.get_close_matches(
        variable, [name for name in table if name.startswith(PREFIX)], n=1, cutoff=0.6
    )
    hint = f"; did you mean {near[0]}?" if near else "; see `gaudiserve serve --help`"
    raise ConfigError(f"the variable {variable} is no setting{hint}")


def _is_service_link(variable: str, word: str) -> bool:
    if _SERVICE_LINK.search(variable):
        return True
    return variable.endswith("_PORT") and bool(_SERVICE_ADDRESS.match(word))


def cache_home() -> str:
    """The folder for what can be made again: $XDG_CACHE_HOME/gaudiserve, else
    ~/.cache/gaudiserve. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path is to be ignored.
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "gaudiserve")


def runtime_environment(config: EngineConfig) -> dict[str, str]:
    """What a process that may hold a worker must have set before it starts.

    The OpenMP libraries read these once, when they are loaded. A user's own settings stay, but for
    the thread count, which a flag may have overruled.
    """
    chosen = openmp_environment()
    if "TOKENIZERS_PARALLELISM" not in os.environ:
        # The tokenizers library warns after a fork unless it is told.
        chosen["TOKENIZERS_PARALLELISM"] = "false"
    if config.num_threads is not None:
        chosen["OMP_NUM_THREADS"] = str(config.num_threads)
    return chosen


def openmp_environment() -> dict[str, str]:
    """Of `runtime_environment`, what also a process of the user's own is given: compute threads
    that sleep soon. Beside two busy processes on two cores, steps took 20 times as long without."""
    wanted = {
        # Idle compute threads spin before they sleep, by default for longer than the whole host
        # side of a step takes. On few cores they would hold up the engine and the front-end, and
        # themselves: who spins keeps the core that the thread waited for could run on, once a
        # neighbour has the other. So many rounds take about as long as to sleep and to be woken.
        "GOMP_SPINCOUNT": "1000",
        # The same for Intel's OpenMP, in milliseconds; its default is 200.
        "KMP_BLOCKTIME": "1",
    }
    if "OMP_WAIT_POLICY" in os.environ:
        del wanted["GOMP_SPINCOUNT"]
    return {name: value for name, value in wanted.items() if name not in os.environ}


def worker_environment(config: EngineConfig) -> dict[str, str]:
    """All variables of a worker's process: ours, and what it needs beside them. Raises ConfigError
    for an execution mode that cannot be."""
    return {**hpu_environment(config), **os.environ, **runtime_environment(config)}


def chosen_device(device: str) -> str:
    """`device`, with auto decided: a Gaudi where the vendor's software is, else the CPU. Imports
    nothing."""
    if device != "auto":
        return device
    return "hpu" if is_installed("habana_frameworks") else "cpu"


def hpu_mode(config: EngineConfig) -> ModeChoice:
    """How a Gaudi, or its emulator, will be driven. Raises ConfigError for a contradiction."""
    is_emulated = chosen_device(config.device) == "hpu-emulator"
    return choose_mode(
        config.execution.mode,
        enforce_eager=config.enforce_eager,
        lazy_variable=os.environ.get("PT_HPU_LAZY_MODE"),
        has_vendor_torch=is_emulated or _has_vendor_torch(),
    )


def hpu_environment(config: EngineConfig) -> dict[str, str]:
    """The runtime's variables for this configuration, empty for other devices: it reads them once,
    when it is first imported. Raises ConfigError for a mode that cannot be."""
    device = chosen_device(config.device)
    if device not in ("hpu", "hpu-emulator"):
        return {}
    wanted = {
        "PT_HPU_LAZY_MODE": str(int(hpu_mode(config).is_lazy)),
        # It wraps parameters and `Tensor.to`, for training; servers switch it off.
        "PT_HPU_WEIGHT_SHARING": "0",
        # Without it the recipe cache counts neither hits nor misses.
        "PT_HPU_ENABLE_CACHE_METRICS": "1",
    }
    recipes = os.path.join(config.cache_dir or cache_home(), "hpu-recipes")
    if device == "hpu" and "," not in recipes:
        # path, delete at start, MB: compiled recipes outlive the process.
        wanted["PT_HPU_RECIPE_CACHE_CONFIG"] = f"{recipes},false,{RECIPE_CACHE_MB}"
    return wanted


def set_missing(variables: Mapping[str, str]) -> None:
    """Set those of this process's variables that are not set: for a worker in a process that its
    parent did not prepare. Before torch is imported, which imports the vendor's runtime."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _has_vendor_torch() -> bool:
    """Whether torch is the vendor's build: the local part of its version starts with git."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return version.partition("+")[2].startswith("git")


def is_installed(module: str) -> bool:
    """Whether a top-level module could be imported; it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # It is loaded already, by something that left its specification empty.
        return True
