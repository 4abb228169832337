"""Checks the installed software: the vendor's packages, torch, Python and the driver. Reads
metadata, kernel files, and what hl-smi and the package manager print."""

from config.execution import RUNTIME_DISTRIBUTION, is_vendor_torch
from hpu.doctor.machine import ERROR, OK, WARN, Finding, Machine
from hpu.gaudi_devices import (
    PYTHONS,
    Release,
    release_of,
    torch_of_release,
)

RUNTIME = "habana_frameworks"

DRIVER_MODULES = ("habanalabs", "habanalabs_cn", "habanalabs_ib", "habanalabs_en")
"""Kernel modules of the driver: the first drives the cards, the others the links between cards."""

QUERIES = (
    ("dpkg-query", "--show", "--showformat", "${Package} ${Version}\n", "habanalabs-*"),
    ("rpm", "--query", "--all", "--queryformat", "%{NAME} %{VERSION}-%{RELEASE}\n", "habanalabs-*"),
)
"""Commands that list the vendor's system packages, on Debian and on Red Hat."""
SYSTEM_PACKAGES = ("habanalabs-graph", "habanalabs-thunk", "habanalabs-rdma-core")
"""Packages of the runtime, which must all be of the same release."""

IMAGE = "start from a Gaudi PyTorch image or installation"


def has_runtime(machine: Machine) -> bool:
    return machine.has_module(RUNTIME)


def runtime_release(machine: Machine) -> Release | None:
    """Release of the vendor's runtime, from its package metadata; None if unknown."""
    return release_of(machine.version(RUNTIME_DISTRIBUTION) or "")


def has_vendor_torch(machine: Machine) -> bool | None:
    """Whether torch is the vendor's build, which lazy mode needs; None without torch."""
    version = machine.version("torch")
    return None if version is None else is_vendor_torch(version)


def driver_version(machine: Machine) -> str | None:
    """Driver version according to hl-smi; None if unknown."""
    text = machine.run(["hl-smi", "-Q", "driver_version", "-f", "csv,noheader"])
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[0] if lines and release_of(lines[0]) else None


def loaded_modules(machine: Machine) -> set[str] | None:
    """Loaded kernel modules of the driver; None if unknown."""
    text = machine.text("proc/modules")
    if text is None:
        return None
    return {line.split()[0] for line in text.splitlines() if line} & set(DRIVER_MODULES)


def software_findings(machine: Machine) -> list[Finding]:
    """Findings about the installed software and whether the versions match."""
    return [
        _runtime(machine),
        *_torch(machine),
        _python(machine),
        _driver(machine),
        *_version_match(machine),
        *_system_packages(machine),
    ]


def _runtime(machine: Machine) -> Finding:
    if not has_runtime(machine):
        return Finding(
            ERROR,
            "runtime",
            f"this Python has no {RUNTIME}",
            "use `make install-hpu` on a host with the vendor's software, or the HPU image; "
            "--device cpu works",
        )
    version = machine.version(RUNTIME_DISTRIBUTION) or "version unknown"
    return Finding(OK, "runtime", f"{RUNTIME} is installed, {RUNTIME_DISTRIBUTION} {version}")


def _torch(machine: Machine) -> list[Finding]:
    version = machine.version("torch")
    if version is None:
        return [Finding(ERROR, "torch", "this Python has no torch", IMAGE)]
    build = "the vendor's build" if has_vendor_torch(machine) else "a stock build"
    findings = [Finding(OK, "torch", f"torch {version}, {build}")]
    release, found = runtime_release(machine), release_of(version)
    wanted = torch_of_release(release) if release else None
    if release and wanted and found and found[:2] != wanted:
        findings.append(
            Finding(
                WARN,
                "torch",
                f"torch is {version}, release {_dotted(release)} has torch {_dotted(wanted)}: the "
                "runtime refuses a torch it was not compiled for",
                f"reinstall the torch of the release, or {IMAGE}",
            )
        )
    return findings


def _python(machine: Machine) -> Finding:
    version = _dotted(machine.python)
    if machine.python in PYTHONS:
        return Finding(OK, "python", f"Python {version}")
    known = ", ".join(_dotted(python) for python in PYTHONS)
    return Finding(
        WARN,
        "python",
        f"Python is {version}, the vendor's images have {known}",
        f"use one of {known}",
    )


def _driver(machine: Machine) -> Finding:
    loaded = loaded_modules(machine)
    if loaded is None:
        return Finding(WARN, "driver", "/proc/modules cannot be read: driver modules unknown")
    if "habanalabs" not in loaded:
        return Finding(
            ERROR,
            "driver",
            "the kernel module habanalabs is not loaded",
            "install the driver on the host, or load it there: modprobe habanalabs",
        )
    missing = [name for name in DRIVER_MODULES if name not in loaded]
    if missing:
        return Finding(
            WARN,
            "driver",
            f"the kernel modules {', '.join(missing)} are not loaded: several cards cannot work "
            "together",
            "load them on the host with modprobe; a single card does not need them",
        )
    return Finding(OK, "driver", f"kernel modules loaded: {', '.join(DRIVER_MODULES)}")


def release_mismatch(machine: Machine) -> str:
    """Text with both versions, if driver and runtime are of different releases, which the vendor
    does not support; empty if they match or one is unknown."""
    driver, release = driver_version(machine), runtime_release(machine)
    driver_release = release_of(driver) if driver else None
    if not (driver_release and release) or driver_release[:3] == release[:3]:
        return ""
    return (
        f"the driver is {driver}, the runtime {_dotted(release)}: only equal releases work together"
    )


OTHER_RELEASE = "use the image of the driver's release, or update the driver on the host"


def _version_match(machine: Machine) -> list[Finding]:
    """Findings about different releases of driver and runtime. Only a warning: some pairs work, and
    `explain` adds both versions to the runtime's errors."""
    if not has_runtime(machine):
        return []
    if mismatch := release_mismatch(machine):
        return [Finding(WARN, "driver version", mismatch, OTHER_RELEASE)]
    driver = driver_version(machine)
    if not (driver and runtime_release(machine)):
        return [Finding(OK, "driver version", f"driver version {driver or 'unknown'}")]
    return [Finding(OK, "driver version", f"driver {driver} fits the runtime's release")]


def system_packages(machine: Machine) -> dict[str, str]:
    """Versions of the vendor's installed system packages, by name; empty if unknown."""
    for query in QUERIES:
        lines = [line.split() for line in (machine.run(query) or "").splitlines()]
        if found := {line[0]: line[1] for line in lines if len(line) == 2}:
            return found
    return {}


def _system_packages(machine: Machine) -> list[Finding]:
    """Findings about the vendor's system packages; empty if the package manager reports none."""
    found = system_packages(machine)
    if not found:
        return []
    listed = ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
    releases = {found[name].rpartition("-")[0] for name in SYSTEM_PACKAGES if name in found}
    if len(releases) > 1:
        return [
            Finding(
                WARN,
                "system packages",
                f"packages of {len(releases)} releases are installed: {listed}",
                f"install {', '.join(SYSTEM_PACKAGES)} of one release",
            )
        ]
    return [Finding(OK, "system packages", listed)]


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
