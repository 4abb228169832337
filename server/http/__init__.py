"""HTTP: protocol limits, bodies, authentication, errors, SSE, the access log, the proxy to
peers."""
