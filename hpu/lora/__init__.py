"""LoRA adapters on a device: a rank's adapter weights, their slots, and the LoRA matmuls that
layers add to their outputs."""
