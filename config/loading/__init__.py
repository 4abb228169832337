"""From flags, environment variables and YAML to the config dataclasses.

Every setting of a server is declared here once, with its help text.
"""
