"""Devices behind one Backend protocol (base.py), a file each, with the names of config/devices/.

select.py imports only the chosen file.
"""
