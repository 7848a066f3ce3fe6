"""How a keeper process is started: in bubblewrap, in namespaces of our own, or (a recipe accepted the risk) as it is.

`binds` says what the sandbox can see: the system's programs and libraries, the Python that runs tithe, the folder
`trainer/reward/sandbox`, nothing else. Whether a kind really isolates on this machine is not read off a version but tried:
see `trainer.reward.code.self_test`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

Kind = Literal["bubblewrap", "namespaces", "none-i-accept-the-risk"]
HERE = Path(__file__).resolve().parent / "sandbox"
INSIDE = "/tithe/tithe_sandbox"
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives", "/nix/store")


def binds() -> list[tuple[str, str]]:
    """Return what a sandbox sees, read-only: (path here, path there)."""
    python = {os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix, os.path.dirname(os.path.realpath(sys.executable))}
    shown = [path for path in SYSTEM if os.path.lexists(path)]
    shown += sorted(path for path in python if not any(path == s or path.startswith(s + "/") for s in shown))
    roots = [path for path in shown if not any(path != other and path.startswith(other + "/") for other in shown)]
    return [(path, path) for path in roots] + [(str(HERE), INSIDE)]


def python_command(folder: str, call: str) -> list[str]:
    """Return the command that runs one call of the sandbox package, loaded from its folder by itself."""
    program = (
        "import sys, importlib.util as u; "
        f"s = u.spec_from_file_location('tithe_sandbox', {folder + '/__init__.py'!r}, submodule_search_locations=[{folder!r}]); "
        "m = u.module_from_spec(s); sys.modules['tithe_sandbox'] = m; s.loader.exec_module(m); "
        f"from tithe_sandbox import {call.partition('.')[0]}; {call}"
    )
    return [sys.executable, "-I", "-B", "-c", program]


def bubblewrap_command(command: list[str]) -> list[str]:
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    words = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session"]
    if os.getuid() == 0:
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user"]
    targets = [target for _, target in binds()]
    for folder in sorted({str(above) for target in targets for above in Path(target).parents} - {"/"}):
        words += ["--perms", "0755", "--dir", folder]  # else they are closed to all but the owner
    for source, target in binds():
        link = os.path.islink(source)
        words += ["--symlink", os.readlink(source), target] if link else ["--ro-bind", source, target]
    words += ["--proc", "/proc", "--dir", "/tmp", "--dir", "/dev"]
    for name in ("null", "zero", "full", "random", "urandom"):
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return [*words, "--remount-ro", "/", "--chdir", "/", "--", *command]


def start(kind: Kind, call: str, descriptors: list[int]) -> subprocess.Popen[bytes]:
    """Start one keeper.

    Args:
        call: Python expression inside the sandbox package, such as `test_side.main(7, 8)`.
        descriptors: sockets that it inherits under the same numbers.
    """
    outside = str(HERE)
    if kind == "bubblewrap":
        command = bubblewrap_command(python_command(INSIDE, call))
    elif kind == "namespaces":
        plan = json.dumps({"binds": binds(), "command": python_command(INSIDE, call)})
        command = python_command(outside, f"enter.main({plan!r})")
    else:
        command = python_command(outside, call)
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp", "PYTHONHASHSEED": "0"}
    environment["MALLOC_ARENA_MAX"] = "1"  # an arena per thread would eat an answer's address space
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(
        command, pass_fds=descriptors, env=environment | threads, stdin=subprocess.DEVNULL, start_new_session=True
    )


def available(kind: Kind) -> str | None:
    """Return why a kind cannot even be tried on this machine, or None."""
    if sys.platform != "linux":
        return "needs Linux"
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed (apt-get install bubblewrap)"
    return None
