"""Checks of the self-test, which are discovered by their files: each file lists its checks in
CHECKS. The files do not import torch: a program gets torch from its Card."""
