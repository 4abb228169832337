"""Properties of the values of --device, one file for each kind of device."""
