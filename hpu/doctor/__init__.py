"""Diagnosis of a Gaudi machine: packages, driver, cards, environment variables.

Runs before any of the vendor's modules is imported, and opens no device.
"""
