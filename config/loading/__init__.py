"""From flags, environment variables and YAML to the config dataclasses.

Settings are declared on the dataclass fields; flags.py makes flags of them.
"""
