"""LoRA adapters on a device: a rank's adapter weights, their slots, and the low-rank products that
layers add to their own. config/lora reads the adapter folders; the engine decides which adapter is
in which slot."""
