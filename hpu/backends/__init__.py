"""The device backends, which implement the Backend protocol (base.py). Their files have the same
names as the files in config/devices/. select.py imports only the selected backend."""
