"""Reads LoRA adapters (PEFT folders and GGUF files), and checks them against the base model.
Imports no torch."""
