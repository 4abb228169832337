"""Decoder families. Each file has related families, and a mapping FAMILIES of architecture names to
registry entries (config.model.decoder_spec.Family)."""
