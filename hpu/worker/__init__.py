"""The worker of a device: loading, building, serving and sleep, and the plans of its memory."""
