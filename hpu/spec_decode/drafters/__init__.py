"""How each draft method proposes tokens, on the host and on a device with its own memory. The
settings and sizes of a method are in the file of the same name in config/speculation/."""
