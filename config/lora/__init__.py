"""The settings of LoRA adapters. What their folders hold is in config/adapters."""
