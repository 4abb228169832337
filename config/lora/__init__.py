"""LoRA adapters without tensors: the contents of PEFT folders and GGUF files, checked against the
base model. Imports no torch."""
