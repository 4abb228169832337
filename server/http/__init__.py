"""HTTP that all APIs share: the protocol and its limits, TLS, bodies, authentication, errors,
streams, the access log, and the proxy to peers."""
