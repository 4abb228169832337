"""Checks the runtime's environment variables, the graph compiler's files and the host's memory.
Sets nothing."""

from config.errors import bytes_text
from config.execution import RUNTIME_DISTRIBUTION
from config.loading.compiler_files import COMPILER_FILES
from config.loading.recipe_cache import RECIPE_CACHE_CONFIG, refused_form
from config.setting import is_count
from hpu.doctor.cards import DetectedCard
from hpu.doctor.machine import ERROR, OK, WARN, Finding, Machine
from hpu.doctor.software import has_vendor_torch
from hpu.gaudi_devices import GIB, NUM_MODULES, PAIRS, QUADS
from hpu.host import usable_memory

MODULES = "HABANA_VISIBLE_MODULES"
DEVICES = "HABANA_VISIBLE_DEVICES"
RUNTIME_ERROR = "HABANA_RUNTIME_ERROR"
"""Variable in which the container runtime reports its last error: it starts the container anyway
(HabanaAI/gaudi-container-runtime, README.md)."""
LAZY = "PT_HPU_LAZY_MODE"
NO_TENSOR_CACHE = "PT_HPUGRAPH_DISABLE_TENSOR_CACHE"
COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
WEIGHT_SHARING = "PT_HPU_WEIGHT_SHARING"

HOST_BYTES_PER_CARD = 409 * GIB // 8
"""Host memory per card, an eighth of what published manifests for eight cards request."""
HUGE_PAGES_MIB_PER_CARD = 12 * 1024
"""Huge pages per card, as deploy/kubernetes requests them. Published manifests request 95000 MiB
for eight cards, rounded up here to whole GiB per card."""


def visible_modules(machine: Machine) -> tuple[int, ...] | None:
    """Module ids in HABANA_VISIBLE_MODULES; None if it is not set or invalid."""
    words = [word.strip() for word in machine.environment.get(MODULES, "").split(",")]
    if not any(words) or not all(is_count(word) for word in words):
        return None
    return tuple(int(word) for word in words)


def environment_findings(
    machine: Machine, cards: tuple[DetectedCard, ...], num_cards: int
) -> list[Finding]:
    """Findings about the runtime's variables that are set, and about the compiler's files."""
    return [
        *_modules(machine, cards, num_cards),
        *_devices(machine),
        *_container_error(machine),
        *_lazy(machine),
        *_tensor_cache(machine),
        *_collectives(machine, num_cards),
        *_weight_sharing(machine),
        *_recipe_cache(machine),
        *compiler_findings(machine, has_cards=bool(cards)),
    ]


def host_findings(machine: Machine, num_cards: int) -> list[Finding]:
    """Findings about host memory and huge pages, compared with published deployments."""
    free, _ = usable_memory(machine.root)
    wanted = HOST_BYTES_PER_CARD * num_cards
    findings = []
    if 0 < free < wanted:
        findings.append(
            Finding(
                WARN,
                "host memory",
                f"{bytes_text(free)} of host memory are free, published deployments have "
                f"{wanted / GIB:.0f} GiB for {_cards(num_cards)}",
                "loading and compiling may run out of host memory; a small model needs less",
            )
        )
    pages = _huge_page_mib(machine)
    wanted_mib = HUGE_PAGES_MIB_PER_CARD * num_cards
    if pages is not None and pages < wanted_mib:
        findings.append(
            Finding(
                WARN,
                "huge pages",
                f"{pages} MiB of huge pages are reserved, deployments reserve {wanted_mib} MiB "
                f"for {_cards(num_cards)}",
                "reserve 2 MiB pages on the host: sysctl vm.nr_hugepages="
                f"{wanted_mib // 2}, or hugepages-2Mi in Kubernetes",
            )
        )
    return findings or [Finding(OK, "host memory", f"{bytes_text(free)} are free")]


def _modules(machine: Machine, cards: tuple[DetectedCard, ...], num_cards: int) -> list[Finding]:
    text = machine.environment.get(MODULES)
    if not text:
        return []
    modules = visible_modules(machine)
    if modules is None:
        what = f"{MODULES} is {text!r}: it must be comma-separated module ids, like 0,1"
        return [Finding(ERROR, MODULES, what, f"correct it, or unset {MODULES}")]
    if len(set(modules)) < len(modules):
        return [Finding(ERROR, MODULES, f"{MODULES} is {text!r}: it names a module twice")]
    existing = {card.module for card in cards} - {None} or set(range(NUM_MODULES))
    missing = [module for module in modules if module not in existing]
    if missing:
        return [
            Finding(
                ERROR,
                MODULES,
                f"{MODULES} is {text!r}, but this machine has the modules "
                f"{', '.join(str(path) for path in sorted(existing, key=str))}",
                f"name only these ids, or unset {MODULES}: indices of hl-smi are not module ids",
            )
        ]
    if len(modules) < num_cards:
        what = f"{MODULES} names {len(modules)} modules, {num_cards} cards are needed"
        return [Finding(ERROR, MODULES, what, f"name {num_cards} modules")]
    groups = {2: PAIRS, 4: QUADS}.get(num_cards, ())
    used = tuple(sorted(modules[:num_cards]))
    if groups and used not in groups:
        valid = "  ".join(",".join(map(str, group)) for group in groups)
        # Only a warning: the collectives take any modules of a machine (a partial box in HCL's
        # hcl_dynamic_communicator.cpp), and Kubernetes assigns any.
        return [
            Finding(
                WARN,
                MODULES,
                f"the modules {','.join(map(str, used))} are no group of {num_cards} that the "
                "vendor lists",
                f"if the cards cannot work together, use one of {valid}",
            )
        ]
    return [Finding(OK, MODULES, f"modules {text}")]


def _devices(machine: Machine) -> list[Finding]:
    text = machine.environment.get(DEVICES)
    if not text:
        return []
    words = [word.strip() for word in text.split(",")]
    if text != "all" and not all(is_count(word) for word in words):
        what = f"{DEVICES} is {text!r}: it must be `all` or comma-separated indices, like 0,1"
        return [Finding(WARN, DEVICES, what, "correct it where the container is started")]
    if not machine.in_container and text != "all":
        return [
            Finding(
                WARN,
                DEVICES,
                f"{DEVICES} is {text!r}: only the container runtime reads this variable",
                f"name module ids in {MODULES} instead",
            )
        ]
    return [Finding(OK, DEVICES, f"{DEVICES} is {text}")]


def _container_error(machine: Machine) -> list[Finding]:
    text = machine.environment.get(RUNTIME_ERROR)
    if not text:
        return []
    what = f"the container runtime reports: {text}"
    return [Finding(WARN, RUNTIME_ERROR, what, "look at its log on the host")]


def _lazy(machine: Machine) -> list[Finding]:
    text = machine.environment.get(LAZY)
    if text is None:
        return []
    if text not in ("0", "1"):
        what = f"{LAZY} is {text!r}: the runtime's library takes a number, and lazy mode is 1"
        return [Finding(ERROR, LAZY, what, "set 0 or 1")]
    if text != "0" and has_vendor_torch(machine) is False:
        return [
            Finding(
                ERROR,
                LAZY,
                f"{LAZY} is {text!r}, which asks for lazy mode, and torch "
                f"{machine.version('torch')} is not the vendor's build: the runtime refuses",
                f"set {LAZY}=0, or use an image with the vendor's torch",
            )
        ]
    return [Finding(OK, LAZY, f"{LAZY} is {text}")]


def _tensor_cache(machine: Machine) -> list[Finding]:
    text = machine.environment.get(NO_TENSOR_CACHE)
    if text is None:
        return []
    if text in ("0", "1"):
        return [Finding(OK, NO_TENSOR_CACHE, f"{NO_TENSOR_CACHE} is {text}")]
    return [
        Finding(
            WARN,
            NO_TENSOR_CACHE,
            f"{NO_TENSOR_CACHE} is {text!r}: only the exact word 1 means yes, so this keeps every "
            "graph's tensors in device memory",
            f"set {NO_TENSOR_CACHE}=1, or unset it",
        )
    ]


def _collectives(machine: Machine, num_cards: int) -> list[Finding]:
    text = machine.environment.get(COLLECTIVES)
    if num_cards == 1 or text is None or text.lower() in ("1", "true"):
        return []
    return [
        Finding(
            ERROR,
            COLLECTIVES,
            f"{COLLECTIVES} is {text!r}: HPU graphs over {num_cards} cards would hang",
            f"unset it, or set {COLLECTIVES}=true",
        )
    ]


def _weight_sharing(machine: Machine) -> list[Finding]:
    text = machine.environment.get(WEIGHT_SHARING)
    if text in (None, "0"):
        return []
    return [
        Finding(
            WARN,
            WEIGHT_SHARING,
            f"{WEIGHT_SHARING} is {text!r}: parameters are wrapped, without a benefit for a server",
            f"set {WEIGHT_SHARING}=0, or unset it",
        )
    ]


def _recipe_cache(machine: Machine) -> list[Finding]:
    text = machine.environment.get(RECIPE_CACHE_CONFIG)
    if not text:
        return []
    reason = refused_form(text, machine.version(RUNTIME_DISTRIBUTION) or "")
    if not reason:
        return [Finding(OK, RECIPE_CACHE_CONFIG, f"{RECIPE_CACHE_CONFIG} is {text}")]
    # Only a warning: the release from which on a form is refused is not documented exactly.
    return [
        Finding(
            WARN,
            RECIPE_CACHE_CONFIG,
            f"{RECIPE_CACHE_CONFIG} is {text!r}: {reason}",
            f"unset {RECIPE_CACHE_CONFIG}: a worker sets it, in the cache folder",
        )
    ]


def compiler_findings(machine: Machine, *, has_cards: bool) -> list[Finding]:
    """Findings about files that the graph compiler would not find. A variable may hold several
    paths; a variable that is not set is checked only with `has_cards`."""
    findings = []
    for name, path in COMPILER_FILES.items():
        text = machine.environment.get(name, "")
        paths = [word for word in text.split(":") if word] or [f"/{path}"]
        if (not text and not has_cards) or any(_exists(machine, word) for word in paths):
            continue
        findings.append(
            Finding(
                ERROR if text else WARN,
                name,
                f"{name} {f'is {text!r}' if text else 'is not set'}, and {' and '.join(paths)} "
                f"{'does' if len(paths) == 1 else 'do'} not exist: without these files the "
                "compiler fails at the first operation, with status 26 and an empty log",
                f"unset {name}, or set it as /etc/profile.d/habanalabs.sh does"
                if text
                else f"install the vendor's packages, or set {name} to where they are",
            )
        )
    return findings


def _exists(machine: Machine, path: str) -> bool:
    return (machine.root / path.lstrip("/")).exists()


def _huge_page_mib(machine: Machine) -> int | None:
    """Total size of the reserved huge pages of the default size in MiB; None if unknown."""
    fields = {}
    for line in (machine.text("proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and is_count(words[0]):
            fields[name] = int(words[0])
    if "HugePages_Total" not in fields or "Hugepagesize" not in fields:
        return None
    return fields["HugePages_Total"] * fields["Hugepagesize"] // 1024


def _cards(number: int) -> str:
    return "one card" if number == 1 else f"{number} cards"
