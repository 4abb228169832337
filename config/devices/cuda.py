"""NVIDIA GPUs, for development."""

from config.devices.base import Device, Installed


def _problem(installed: Installed) -> str:
    if not installed.torch.endswith("+cpu"):
        return ""
    return (
        f"--device is 'cuda', and torch {installed.torch} is a CPU build; install a CUDA build, or "
        "use --device cpu"
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
