"""`python -m flows.guard <parent pid> <module> <arguments>`: run a module as a program that ends when its parent does.

For servers: one that outlived a killed `tithe` would hold its port and its database.
"""

from __future__ import annotations

import os
import runpy
import sys

from trainer.processes import die_with_parent, importing

if __name__ == "__main__":
    parent = int(sys.argv[1])
    die_with_parent(lambda: os.getppid() == parent)
    sys.argv = sys.argv[2:]
    with importing():  # a server's start is nothing else; it may go on like that, it lives as long as its parent
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
