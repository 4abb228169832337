"""LoRA adapters as facts: what a PEFT folder says, and whether it fits the base model. Reads
headers, no weights; imports no torch."""
