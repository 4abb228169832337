"""The version of this distribution; the package metadata reads it from here."""

VERSION = "0.1.0"
