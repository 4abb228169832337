"""Parameters of a request, and settings of adapters, offloading and speculation."""
