"""HTTP plumbing: protocol bounds, bodies, auth, errors, SSE, the access log, the proxy to peers."""
