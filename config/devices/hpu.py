"""Gaudi cards, and a Gaudi card emulated on the CPU."""

from config.devices.base import Device, Installed

HABANA_VISIBLE_MODULES = "HABANA_VISIBLE_MODULES"
RUNTIME = "habana_frameworks"


def _problem(installed: Installed) -> str:
    if installed.has_module(RUNTIME):
        return ""
    return (
        f"--device is 'hpu', and {RUNTIME}, the Gaudi runtime, is not installed here: install it "
        "with `make install-hpu` or use the HPU image; without a Gaudi, use --device cpu or "
        "hpu-emulator"
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
