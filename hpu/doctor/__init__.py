"""Diagnosis of a Gaudi machine: packages, driver, cards and their links, environment variables,
host memory, and the error texts of the runtime.

Imports none of the vendor's modules and opens no device.
"""
