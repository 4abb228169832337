"""Diagnosis of a Gaudi machine: packages, driver, cards, environment variables.

Imports none of the vendor's modules and opens no device.
"""
