"""Gaudi cards, and a card that is emulated on the CPU."""

from config.devices.base import Device, Installed

HABANA_VISIBLE_MODULES = "HABANA_VISIBLE_MODULES"
RUNTIME = "habana_frameworks"


def _problem(installed: Installed) -> str:
    if installed.has_module(RUNTIME):
        return ""
    return (
        f"device is 'hpu', and {RUNTIME}, the runtime of Gaudi, is not installed here; without a "
        "Gaudi the devices are cpu and hpu-emulator"
    )


KINDS = {
    "hpu": Device(
        cards_variable=HABANA_VISIBLE_MODULES,
        ray_resource="HPU",
        is_gaudi=True,
        problem=_problem,
    ),
    "hpu-emulator": Device(is_gaudi=True, uses_cores=True),
}
