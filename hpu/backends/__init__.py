"""Devices: cpu, cuda and gaudi behind one Backend protocol (base.py).

select.py imports only the chosen one.
"""
