"""LoRA adapters on a device."""
