"""A stand-in for the vendor's package that holds the HPU code to HPU rules on a CPU.

It is not a back end: the file under test is the file that ships.
"""
