"""`python -m tasks <stage>`: run one stage, or `all` in order, in the workspace of the current directory.

Needs no Prefect server, no DVC and no MLflow server. Exit codes: trainer/errors.py.
"""

from __future__ import annotations

import sys

from tasks.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
