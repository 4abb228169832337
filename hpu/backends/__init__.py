"""The device backends, which implement the Backend protocol (base.py). select.py imports only the
selected backend, from the file with the name of the device's file in config/devices/."""
