"""How each draft method proposes tokens, on the host and on a device with its own memory."""
