"""NVIDIA GPUs, for development."""

from config.devices.base import Device, Installed


def _problem(installed: Installed) -> str:
    if not installed.torch.endswith("+cpu"):
        return ""
    return (
        f"device is 'cuda', and torch {installed.torch} is built for the CPU alone; install "
        "another torch, or use the device cpu"
    )


KINDS = {
    "cuda": Device(
        cards_variable="CUDA_VISIBLE_DEVICES",
        ray_resource="GPU",
        driver="NVIDIA",
        driver_file="proc/driver/nvidia/version",
        problem=_problem,
    )
}
