"""LoRA adapters as facts: the contents of a PEFT folder, and whether they fit the base model. Reads
headers, no weights; imports no torch."""
