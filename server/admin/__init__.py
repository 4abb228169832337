"""Routes for operators: probes, metrics, profiling, sleep, the API docs, the status page."""
