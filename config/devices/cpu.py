"""The CPU of the host."""

from config.devices.base import Device

KINDS = {"cpu": Device(uses_cores=True)}
