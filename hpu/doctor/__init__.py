"""Diagnosis of a Gaudi machine: packages, driver, cards, environment variables.

Runs before anything of the vendor is imported and opens no device.
"""
