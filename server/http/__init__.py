"""HTTP: protocol limits, TLS, pacing, bodies, JSON, authentication, trusted proxies, errors, SSE,
static files, the access log, the proxy to peers."""
