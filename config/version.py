"""The version of this distribution, said once: the package's metadata is made from it."""

VERSION = "0.1.0"
