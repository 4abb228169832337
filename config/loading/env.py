"""Environment variables: settings from variables, and the variables of workers. No other module of
config, engine, hpu and server reads os.environ."""

import importlib.util
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from config.cache_folder import cache_path
from config.devices.base import DEVICES
from config.devices.hpu import HABANA_VISIBLE_MODULES, RUNTIME
from config.engine import EngineConfig
from config.errors import ConfigError
from config.execution import (
    EMULATED_RELEASE,
    RUNTIME_DISTRIBUTION,
    ModeChoice,
    choose_mode,
    is_vendor_torch,
)
from config.loading.cards import visible_modules
from config.loading.compiler_files import COMPILER_FILES, compiler_variables
from config.loading.flags import FILE_FLAGS, FLAGS, variable_of
from config.loading.recipe_cache import RECIPE_CACHE_CONFIG, keeps_recipes, recipe_cache_config
from config.loading.values import joined, nearest
from config.loading.vllm_flags import ACCEPTED, absence
from config.model.architectures import decoder_spec
from config.model.quantization.inc import read_quant_config
from config.model.read_config import read_model_config
from config.setting import is_count
from config.version import installed_version

PREFIX = "GAUDISERVE_"

DATA_PARALLEL_TOKEN = "GAUDISERVE_DATA_PARALLEL_TOKEN"
"""Variable with the shared secret that authenticates the hosts of a server to each other. No flag
and no file can set it."""
MIN_TOKEN_CHARACTERS = 16

_RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
_MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")

HLS_MODULE_ID = "HLS_MODULE_ID"

# Endings of the variables that Kubernetes sets in every pod for each service.
_SERVICE_LINK = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
_SERVICE_ADDRESS = re.compile(r"^(tcp|udp|sctp)://")


def environment() -> Mapping[str, str]:
    """A copy of this process's environment variables."""
    return dict(os.environ)


def variable_table() -> dict[str, str]:
    """Environment variable -> flag, in decreasing precedence: our own names come before names of
    other servers."""
    table = {flag.variable: flag.key for flag in FLAGS}
    names = [name for flag in FLAGS for name in flag.names[1:]]
    table.update({variable_of(name): name for name in (*names, *FILE_FLAGS, *ACCEPTED)})
    for flag in FLAGS:
        table.update(flag.setting.switch_variables)
        table.update(dict.fromkeys(flag.setting.variables, flag.key))
    return table


def settings(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(flag, value, variable) of each setting in `environ`, in increasing precedence. An empty
    variable counts as unset. An empty secret is an error: an empty API key would open the server.
    Raises ConfigError, also for unknown GAUDISERVE_ variables."""
    table = variable_table()
    secrets = {name for flag in FLAGS if flag.setting.is_secret for name in flag.names}
    unknown = [
        _unknown(variable, table)
        for variable, word in environ.items()
        if variable.startswith(PREFIX) and variable not in (*table, DATA_PARALLEL_TOKEN)
        if not is_service_link(variable, word)
    ]
    if unknown:
        raise ConfigError(joined(unknown))
    found = []
    for variable in reversed(table):
        word = environ.get(variable, "")
        if variable in environ and not word and table[variable] in secrets:
            raise ConfigError(f"{variable} is set but empty; unset it, or set it to a key")
        if variable == "OMP_NUM_THREADS":
            # A list has a number per nesting level, the outermost first.
            word = word.split(",")[0]
        if word and not is_service_link(variable, word):
            found.append((table[variable], word, variable))
    return found


def _unknown(variable: str, known: Iterable[str]) -> str:
    name = variable.removeprefix(PREFIX)
    if reason := absence(name.lower().replace("_", "-")):
        return f"{variable} is not supported: {reason}"
    # Compare without the prefix, which makes any two variables similar. The two dashes of a flag
    # raise the similarity enough to find two swapped letters (PROT, PORT).
    flags = [f"--{key.removeprefix(PREFIX)}" for key in known if key.startswith(PREFIX)]
    hint = nearest(f"--{name}", flags).replace("--", PREFIX)
    return f"the variable {variable} is not a setting{hint or '; see `gaudiserve serve --help`'}"


def is_service_link(variable: str, word: str) -> bool:
    """Whether the variable looks like a variable that Kubernetes sets in every pod for a service,
    such as GAUDISERVE_PORT for a service named gaudiserve."""
    if _SERVICE_LINK.search(variable):
        return True
    return variable.endswith("_PORT") and bool(_SERVICE_ADDRESS.match(word))


def cache_home() -> str:
    """The cache folder: $XDG_CACHE_HOME/gaudiserve, otherwise ~/.cache/gaudiserve. It may not
    exist. Without a home directory, /.cache/gaudiserve: a relative path would depend on the working
    directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification ignores relative paths.
    if not os.path.isabs(base):
        base = os.path.join("/", os.path.expanduser("~").removeprefix("~"), ".cache")
    return os.path.join(base, "gaudiserve")


def runtime_environment(config: EngineConfig) -> dict[str, str]:
    """Variables that a process with a worker needs before it starts: libraries read them when they
    are loaded. The user's variables win, except for the thread count, which a flag may override."""
    chosen = openmp_environment()
    if "TOKENIZERS_PARALLELISM" not in os.environ:
        # Prevents a warning of the tokenizers library after a fork.
        chosen["TOKENIZERS_PARALLELISM"] = "false"
    if "MALLOC_ARENA_MAX" not in os.environ:
        # Use a single arena. trim_memory returns memory at the end of an arena only for the main
        # arena, and threads that compile grammars or read adapters would use other arenas.
        chosen["MALLOC_ARENA_MAX"] = "1"
    if config.num_threads is not None:
        chosen["OMP_NUM_THREADS"] = str(config.num_threads)
    return chosen


def openmp_environment() -> dict[str, str]:
    """The part of `runtime_environment` that is also set in a user's process (offline inference):
    it makes idle compute threads sleep soon. Without it, steps took 20 times as long on two cores
    with two other busy processes."""
    variables = {
        # By default, idle compute threads spin for longer than the host part of a step. On few
        # cores they delay the engine, the API server and each other: a spinning thread occupies the
        # core that the thread it waits for could use. This many iterations take about as long as
        # going to sleep and waking up.
        "GOMP_SPINCOUNT": "1000",
        # The equivalent for Intel's OpenMP, in milliseconds; the default is 200.
        "KMP_BLOCKTIME": "1",
    }
    if "OMP_WAIT_POLICY" in os.environ:
        del variables["GOMP_SPINCOUNT"]
    return {name: value for name, value in variables.items() if name not in os.environ}


def notify_socket() -> str:
    """Address at which systemd waits for the message that this service is ready; empty outside of a
    unit with Type=notify."""
    return os.environ.get("NOTIFY_SOCKET", "")


def data_parallel_token() -> str:
    """Secret that engines present to API servers on another host. Raises ConfigError if it is
    missing or too short."""
    token = os.environ.get(DATA_PARALLEL_TOKEN, "")
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"the variable {DATA_PARALLEL_TOKEN} has {len(token)} characters, it must have at "
            f"least {MIN_TOKEN_CHARACTERS} and be the same on each host"
        )
    return token


class LaunchedRank(NamedTuple):
    """Rank of this process, as set by a launcher such as torchrun."""

    world_size: int
    rank: int
    local_rank: int


def launched_rank() -> LaunchedRank:
    """Ranks and world size set by the launcher. torch.distributed reads the two rendezvous
    variables itself (init method env://). Raises ConfigError."""
    missing = [name for name in (*_RANK_VARIABLES, *_MASTER_VARIABLES) if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"--distributed-executor-backend is external_launcher, and {', '.join(missing)} are "
            "not set: start the script with torchrun --nproc-per-node N"
        )
    words = [os.environ[name] for name in _RANK_VARIABLES]
    for name, word in zip(_RANK_VARIABLES, words, strict=True):
        if not is_count(word):
            raise ConfigError(f"the variable {name} is {word!r}, it must be a number")
    ranks = LaunchedRank(*map(int, words))
    if ranks.rank >= ranks.world_size:
        raise ConfigError(
            f"RANK is {ranks.rank} and WORLD_SIZE is {ranks.world_size}: RANK must be below "
            "WORLD_SIZE"
        )
    return ranks


def device_environment(
    config: EngineConfig, index: int, count: int, *, num_cards: int = 1
) -> dict[str, str]:
    """Variables that assign `num_cards` of the cards visible to this process to engine `index` of
    the `count` engines on this host; empty for a device without cards and for a single engine.
    Raises ConfigError if there are fewer visible cards than the engines need."""
    variable = DEVICES[chosen_device(config.device)].cards_variable
    if not variable or count == 1:
        return {}
    words = [word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()]
    source = variable
    if not words and variable == HABANA_VISIBLE_MODULES:
        words, source = [str(module) for module in visible_modules()], "this machine"
    cards = words or [str(card) for card in range(count * num_cards)]
    if len(cards) < count * num_cards:
        raise ConfigError(
            f"{count} engines with {num_cards} cards each need {count * num_cards} cards, "
            f"{source} has {len(cards)} ({','.join(cards)})"
        )
    own = cards[index * num_cards : (index + 1) * num_cards]
    variables = {variable: ",".join(own)}
    if variable == HABANA_VISIBLE_MODULES and num_cards == 1:
        # Without this variable, a process without a process group takes the first free card.
        variables[HLS_MODULE_ID] = own[0]
    return variables


def worker_environment(config: EngineConfig) -> dict[str, str]:
    """Environment of a worker process: the variables of this process, with the changes that the
    worker needs. Raises ConfigError."""
    variables = {**hpu_environment(config), **os.environ, **runtime_environment(config)}
    variables = _with_modules(config, variables)
    if chosen_device(config.device) == "hpu":
        variables |= compiler_variables(variables)
    if config.parallel.world_size > 1:
        # The variable would override the rank of each worker, so all workers would use the same
        # card.
        variables.pop(HLS_MODULE_ID, None)
    return variables


def selftest_environment(
    config: EngineConfig, recipe_folder: str, tested: Collection[str], *, is_lazy: bool
) -> dict[str, str]:
    """Environment of a self-test process: the variables of a worker with the given `is_lazy`.
    Variables in `tested`, which the self-test may set for a server, have their defaults."""
    own = {name: word for name, word in os.environ.items() if name not in tested}
    fixed = {
        "PT_HPU_LAZY_MODE": str(int(is_lazy)),
        RECIPE_CACHE_CONFIG: recipe_cache_config(recipe_folder, _runtime_release(config)),
    }
    variables = _hpu_variables(config, is_lazy=is_lazy) | own | fixed | runtime_environment(config)
    if chosen_device(config.device) == "hpu":
        variables |= compiler_variables(variables)
    return _with_modules(config, variables)


def selftest_file(config: EngineConfig) -> Path:
    """The file with the result of the self-test, next to the folder of compiled recipes."""
    folder = os.path.join(config.cache_dir or cache_home(), "hpu-recipes")
    kept = os.environ.get(RECIPE_CACHE_CONFIG, "").partition(",")[0]
    return Path(f"{kept or folder}-selftest.json")


def _with_modules(config: EngineConfig, variables: dict[str, str]) -> dict[str, str]:
    is_unset = not variables.get(HABANA_VISIBLE_MODULES)
    if chosen_device(config.device) == "hpu" and is_unset and (modules := visible_modules()):
        # The container runtime sets this variable from 1.23 on. Without it the vendor's runtime
        # uses ranks as module ids, although module ids and device nodes are numbered differently.
        variables[HABANA_VISIBLE_MODULES] = ",".join(map(str, modules))
    return variables


def module_id(device_index: int, world_size: int) -> int | None:
    """The module id that the vendor's runtime chooses for this worker's card. `device_index`: index
    of the card among the cards used on this host. None if the runtime takes any free card, or if
    the id is not a number. Raises ConfigError if too few cards are visible."""
    own = os.environ.get(HLS_MODULE_ID, "")
    if is_count(own):
        return int(own)
    if world_size == 1:
        return None
    visible = [word for word in os.environ.get(HABANA_VISIBLE_MODULES, "").split(",") if word]
    source = f"{HABANA_VISIBLE_MODULES} names"
    if not visible:
        visible, source = [str(module) for module in visible_modules()], "this machine has"
    if not visible:
        return device_index
    if device_index >= len(visible):
        raise ConfigError(
            f"{source} {len(visible)} cards ({','.join(visible)}), and this "
            f"host has at least {device_index + 1} workers"
        )
    word = visible[device_index].strip()
    return int(word) if is_count(word) else None


def card_environment(device: str, card: str) -> dict[str, str]:
    """Additional variables of an HPU worker with a single visible card, `card`; empty for other
    devices."""
    # Without this variable, a process without a process group takes the first free card.
    return {HLS_MODULE_ID: card} if device == "hpu" else {}


def chosen_device(device: str) -> str:
    """`device`; for auto, hpu if the vendor's software is installed, otherwise cpu."""
    if device != "auto":
        return device
    return "hpu" if is_installed(RUNTIME) else "cpu"


def hpu_mode(config: EngineConfig, *, has_vendor_torch: bool = False) -> ModeChoice:
    """The execution mode of a Gaudi or its emulator. Raises ConfigError.

    `has_vendor_torch`: whether to assume the vendor's torch, for settings of another machine.
    """
    is_emulated = chosen_device(config.device) == "hpu-emulator"
    return choose_mode(
        config.execution.mode,
        enforce_eager=config.enforce_eager,
        lazy_variable=os.environ.get("PT_HPU_LAZY_MODE"),
        has_vendor_torch=has_vendor_torch or is_emulated or _has_vendor_torch(),
        release=_runtime_release(config),
    )


def _runtime_release(config: EngineConfig) -> str:
    if chosen_device(config.device) == "hpu-emulator":
        return EMULATED_RELEASE
    return installed_version(RUNTIME_DISTRIBUTION)


def hpu_environment(config: EngineConfig) -> dict[str, str]:
    """The variables of the HPU runtime, which reads them at its first import; empty for other
    devices. Raises ConfigError."""
    device = chosen_device(config.device)
    if not DEVICES[device].is_gaudi:
        return {}
    files = compiler_variables(os.environ) if device == "hpu" else {}
    return _hpu_variables(config, is_lazy=hpu_mode(config).is_lazy) | files


def _hpu_variables(config: EngineConfig, *, is_lazy: bool) -> dict[str, str]:
    variables = {
        "PT_HPU_LAZY_MODE": str(int(is_lazy)),
        # The vendor's parameter and `Tensor.to` wrapper is for training; inference servers disable
        # it.
        "PT_HPU_WEIGHT_SHARING": "0",
        # By default the runtime approximates every gelu by tanh (gelu_gen.cpp and env_flags.yaml of
        # HabanaAI/gaudi-pytorch-bridge), also where a model has the exact one.
        "PT_HPU_FORCE_TANH_FOR_GELU": "0",
        # Without this variable the recipe cache counts neither hits nor misses.
        "PT_HPU_ENABLE_CACHE_METRICS": "1",
    }
    if is_lazy:
        # HPU graphs with collectives need this variable.
        variables["PT_HPU_ENABLE_LAZY_COLLECTIVES"] = "true"
        if config.parallel.pipeline_parallel_size > 1:
            # The tensor cache of HPU graphs must stay enabled with pipeline parallelism: graphs
            # read tensors that another stage sent (vllm-project/vllm-gaudi,
            # docs/configuration/pipeline_parallelism.md).
            variables["PT_HPUGRAPH_DISABLE_TENSOR_CACHE"] = "0"
    else:
        # The vendor's plug-in sets these variables too: one recipe for all FP8 scales, and parallel
        # compilation.
        variables["RUNTIME_SCALE_PATCHING"] = str(int(_patches_scales(config)))
        variables["FUSER_ENABLE_MULTI_THREADED_INVOCATIONS"] = "1"
    if _has_gated_delta(config):
        # Speeds up the compilation of these models (env_variables.md of vllm-project/vllm-gaudi).
        variables["ENABLE_EXPERIMENTAL_FLAGS"] = "true"
        variables["ENABLE_SKIP_REMOVAL_OF_GRAPH_INPUT_IDENTITY_NODES"] = "true"
    recipes = str(cache_path(config.cache_dir or cache_home(), "hpu-recipes"))
    value = recipe_cache_config(recipes, _runtime_release(config))
    if chosen_device(config.device) == "hpu" and value:
        # The next process reuses compiled recipes.
        variables[RECIPE_CACHE_CONFIG] = value
    return variables


def _patches_scales(config: EngineConfig) -> bool:
    """Whether the runtime may patch FP8 scales into recipes. False only for scale methods with
    which the compressor does not support it; an unreadable file is reported when it is used."""
    try:
        return not config.quant_config or read_quant_config(config.quant_config).patches_scales
    except ConfigError:
        return True


def _has_gated_delta(config: EngineConfig) -> bool:
    """Whether the model has gated DeltaNet layers. False for a folder without a valid model, which
    is reported when the model is loaded."""
    try:
        return bool(decoder_spec(read_model_config(config.model)).gated_delta)
    except ConfigError:
        return False


def recipe_cache_folder(config: EngineConfig) -> Path | None:
    """The folder in which the worker's runtime caches compiled recipes; None without a cache, or if
    the runtime deletes it on start. Raises ConfigError."""
    if not DEVICES[chosen_device(config.device)].is_gaudi:
        return None
    folder = keeps_recipes({**hpu_environment(config), **os.environ})
    return Path(folder) if folder else None


def disable_autoload() -> None:
    """Prevent `import torch` from loading the vendor's runtime in this process and its children, as
    newer releases do automatically, unless the user has set PT_HPU_AUTOLOAD: only workers may load
    the runtime and open a card."""
    os.environ.setdefault("PT_HPU_AUTOLOAD", "0")


def set_missing(variables: Mapping[str, str]) -> None:
    """Set variables of this process that are not set yet, and empty paths of the compiler's files.
    If a worker runs inside this process, call it before importing torch, which loads the vendor's
    runtime."""
    for name, value in variables.items():
        # An empty path of the compiler's files is as bad as a missing path.
        if name not in os.environ or (name in COMPILER_FILES and not os.environ[name]):
            os.environ[name] = value


def _has_vendor_torch() -> bool:
    return is_vendor_torch(installed_version("torch"))


def is_installed(module: str) -> bool:
    """Whether a top-level module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # The module is loaded but has no spec.
        return True
