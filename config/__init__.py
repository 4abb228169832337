"""Settings, request parameters and checkpoint metadata as frozen, validated dataclasses. Imports
none of the other three packages."""
