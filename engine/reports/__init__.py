"""Reports of `gaudiserve plan`, `presets`, `buckets` and `doctor`; server/cli prints them."""
