"""LoRA adapters on a device: weights of a rank, their slots, and the low-rank products that layers
add to their own. What an adapter's folder says is in config/lora; which adapter is in which slot
is the engine's decision."""
