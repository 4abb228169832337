"""Settings, request parameters and facts of checkpoints, and code that the other packages share.
Imports none of the other three packages."""
