"""Reports of `gaudiserve plan`, `buckets` and `doctor`, as text and JSON; server/cli prints
them."""
