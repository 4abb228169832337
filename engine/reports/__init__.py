"""What `gaudiserve plan`, `buckets` and `doctor` print. Pure; server/cli calls it."""
