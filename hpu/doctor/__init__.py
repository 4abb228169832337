"""What is wrong with this machine: packages, driver, cards, variables.

Looks before anything of the vendor is imported.
"""
