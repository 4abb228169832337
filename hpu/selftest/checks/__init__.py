"""Checks of the self-test, found by their files: a file with a tuple CHECKS adds its checks.
No file here imports torch: a program gets it with the card.
"""
