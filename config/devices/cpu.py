"""The host's cores."""

from config.devices.base import Device

KINDS = {"cpu": Device(uses_cores=True)}
