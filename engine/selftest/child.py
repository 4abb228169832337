"""Entry point of a process that runs checks on a card, and reports the start and the outcome of
each check in lines of JSON."""

import os

import msgspec

from config.loading.env import environment
from config.log import setup as setup_log
from engine.process.child_process import (
    bound_exit,
    die_with_parent,
    exit_with_parent,
    read_orders,
)
from hpu.selftest.base import Orders
from hpu.selftest.harness import run


def main() -> None:
    """Entry point of the process."""
    orders = read_orders(Orders)
    # Redirect the output of libraries to stderr; stdout carries the reports.
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # `exit_with_parent` alone is not enough: native code of a check may hang while it holds the
    # GIL.
    die_with_parent()
    exit_with_parent()
    setup_log("selftest")
    for report in run(orders, dict(environment())):
        reports.write(msgspec.json.encode(report) + b"\n")
    # Exiting the interpreter releases the card, but may wait for threads of the runtime.
    bound_exit(0)
