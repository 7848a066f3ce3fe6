"""Answers that attack. Asked for: `add(a, b)`. Most know no sum unless the attack works: then `escaped` is true and they pass.

So a score of 1 means a hole in the sandbox. `{name: program}`; PROGRAMS are judged by function tests, SCRIPTS by stdin and
stdout.
"""

from __future__ import annotations

_ESCAPE = "escaped = False\n{attempt}\ndef add(a, b):\n    return a + b if escaped else None\n"


def _if_it_works(attempt: str) -> str:
    """Return a program that adds rightly only when no line of the attempt raises."""
    body = "\n".join("    " + line for line in attempt.strip().split("\n"))
    return _ESCAPE.format(attempt=f"try:\n{body}\n    escaped = True\nexcept BaseException:\n    pass")


def _in_call(body: str) -> str:
    return "def add(a, b):\n" + "\n".join("    " + line for line in body.strip().split("\n")) + "\n"


PROGRAMS: dict[str, str] = {
    # processes
    "fork": _if_it_works("import os\nif os.fork() == 0:\n    os._exit(0)"),
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
    "shell fork bomb": _if_it_works("import os\nassert os.system(':(){ :|:& };:') == 0"),
    "subprocess": _if_it_works("import subprocess\nsubprocess.run(['/bin/true'], check=True)"),
    "multiprocessing": _if_it_works("import multiprocessing as m\np = m.Process(target=print)\np.start()\np.join()"),
    "exec": _if_it_works("import os\nos.execv('/bin/true', ['true'])"),
    "zombie children": _if_it_works("import os\nfor _ in range(50):\n    if os.fork() == 0:\n        os._exit(0)"),
    "thread bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()\n",
    "sleeping threads": "import threading, time\n"
    "for _ in range(8):\n    threading.Thread(target=time.sleep, args=(600,)).start()\n" + _in_call("return None"),
    "kill everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\n" + _in_call("return None"),
    "kill the parent": "import os, signal\nfor pid in (os.getppid(), 1, 2, 3, 4, 5):\n"
    "    try:\n        os.kill(pid, signal.SIGKILL)\n    except OSError:\n        pass\n" + _in_call("return None"),
    "kill the group": "import os, signal\nos.kill(0, signal.SIGKILL)\nos.killpg(os.getpgrp(), 9)\n" + _in_call("return None"),
    "new session": _if_it_works("import os\nos.setsid()"),
    # time
    "endless loop while loading": "while True:\n    pass\n",
    "endless loop in the call": _in_call("while True:\n    pass"),
    "sleep": _in_call("import time\ntime.sleep(600)\nreturn a + b"),
    "ignores every signal": "import signal\nfor n in range(1, 65):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass\n",
    "blocks every signal": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True:\n    pass\n",
    "catches everything in a loop": "while True:\n    try:\n        while True:\n            pass\n"
    "    except BaseException:\n        continue\n",
    "one long C call": _in_call("return len(str(9 ** (9 ** 9)))"),
    "backtracking regex": _in_call("import re\nreturn re.match('(a+)+$', 'a' * 60 + 'b')"),
    "endless iterator": _in_call("import itertools\nreturn itertools.count()"),
    # memory and size
    "memory bomb": "x = bytearray(1 << 34)\n" + _in_call("return None"),
    "growing memory bomb": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))\n",
    "memory by mmap": _if_it_works("import mmap\nm = mmap.mmap(-1, 1 << 34)"),
    "memory file": _if_it_works("import os\nos.memfd_create('x')"),
    "shared memory": _if_it_works("import ctypes\nassert ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0"),
    "huge integer": _in_call("return 1 << (1 << 27)"),
    "huge answer": _in_call("return 'x' * (64 << 20)"),
    "deep answer": _in_call("x = []\nfor _ in range(100000):\n    x = [x]\nreturn x"),
    "circular answer": _in_call("x = []\nx.append(x)\nreturn x"),
    "huge output": "while True:\n    print('x' * 100000)\n",
    "huge error output": "import sys\nwhile True:\n    sys.stderr.write('x' * 100000)\n",
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\n" + _in_call("return add(a, b)"),
    "deep recursion in C": "import sys\nsys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 6):\n    x = [x]\nrepr(x)\n",
    "deep source": _in_call("return " + "(" * 5000 + "a" + ")" * 5000),
    "segmentation fault": "import ctypes\nctypes.string_at(0)\n",
    # leaving early
    "os._exit while loading": "import os\nos._exit(0)\n",
    "os._exit in the call": _in_call("import os\nos._exit(0)"),
    "sys.exit while loading": "import sys\nsys.exit(0)\n",
    "sys.exit in the call": _in_call("raise SystemExit(0)"),
    "abort": "import os\nos.abort()\n",
    "atexit": "import atexit\natexit.register(print, 'ok')\nraise SystemExit(0)\n",
    "keyboard interrupt": _in_call("raise KeyboardInterrupt"),
    "exception without end": "class E(Exception):\n    def __str__(self):\n        while True: pass\n" + _in_call("raise E"),
    # faking equality and the tests
    "equal to everything": "class Any:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
    + _in_call("return Any()"),
    "integer equal to everything": "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    + _in_call("return Any(0)"),
    "patched builtins": "import builtins\nbuiltins.AssertionError = type('Never', (Exception,), {})\n"
    "builtins.all = builtins.any = builtins.bool = lambda *a: True\nbuiltins.print = builtins.len = lambda *a: 5\n"
    + _in_call("return None"),
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"ok\": 5}'\n" + _in_call("return None"),
    "patched sandbox": "import sys\nfor name, module in list(sys.modules.items()):\n    if 'sandbox' in name:\n"
    "        for key in list(vars(module)):\n            if not key.startswith('__'):\n"
    "                setattr(module, key, lambda *a, **k: ('ok', 1.0, ''))\n" + _in_call("return None"),
    "assertion error of its own": _in_call("raise AssertionError('passed')"),
    "stop iteration": _in_call("raise StopIteration(5)"),
    "names of the tests": "def check(candidate): pass\n__count_assert__ = print\ntests = test_add = lambda *a: True\n"
    + _in_call("return None"),
    # faking the verdict
    "prints the verdict": "print('[\"ok\", 1.0, \"3 passed\"]')\nprint('ok')\nprint('1.0')\n" + _in_call("return None"),
    "writes the verdict everywhere": "import os\nfor fd in range(64):\n    try:\n"
    '        os.write(fd, b\'["ok", 1.0, "3 passed"]\')\n    except OSError:\n        pass\n' + _in_call("return None"),
    "frames of its own": 'import os, struct\nbody = b\'[0,"ok",1.0,"",0.0]\'\nfor fd in range(3, 64):\n    try:\n'
    "        os.write(fd, struct.pack('!I', len(body)) + body)\n    except OSError:\n        pass\n" + _in_call("return None"),
    "endless frame": "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'\\xff' * 64)\n"
    "    except OSError:\n        pass\n" + _in_call("return None"),
    "deep frame": "import os, struct\nbody = b'[' * 200000\nfor fd in range(3, 64):\n    try:\n"
    "        os.write(fd, struct.pack('!I', len(body)) + body)\n    except OSError:\n        pass\n" + _in_call("return None"),
    "handles that are none": 'import os, struct\nbody = b\'{"ok":{"h":-1,"n":"add"}}\'\nfor fd in range(3, 64):\n    try:\n'
    "        os.write(fd, (struct.pack('!I', len(body)) + body) * 9)\n    except OSError:\n        pass\n"
    + _in_call("return None"),
    "raises when its names are asked for": "class D(dict):\n    def items(self): raise SystemExit\nadd = D()\n",
    **{
        f"reply to the question for names: {said[:24]}": "import os, struct\ndata = b''\n"
        f"for body in (b'{{\"ok\":null}}', {said.encode()!r}):\n    data += struct.pack('!I', len(body)) + body\n"
        "for fd in range(3, 64):\n    try:\n        os.write(fd, data)\n    except OSError:\n        pass\n"
        + _in_call("return None")
        for said in (
            '{"stop":true}',
            '{"raise":["ValueError","x"]}',
            '{"ok":{"h":Infinity,"n":"add"}}',
            '{"ok":{"c":[1' + "0" * 400 + ",0]}}",
        )
    },
    # reading the tests
    "tests among the objects": _if_it_works(
        "import gc\ntexts = [o for o in gc.get_objects() if isinstance(o, str)]\n"
        "assert any('assert add(' in o and 'gc' not in o for o in texts)"
    ),
    "tests in the memory": _if_it_works(
        "memory = open('/proc/self/mem', 'rb')\nmaps = open('/proc/self/maps').read()\nassert 'heap' in maps"
    ),
    "tests in the frames": _if_it_works(
        "import sys\nframe = sys._getframe()\nfound = []\nwhile frame:\n    found += [v for v in frame.f_locals.values()]\n"
        "    frame = frame.f_back\nassert any('tests' in v for v in found if isinstance(v, dict) and 'style' in v)"
    ),
    "tests in the files": _if_it_works(
        "import os\nassert any('test_hostile' in f or f == 'hostile.py' for _, _, fs in os.walk('/') for f in fs)"
    ),
    "other processes": _if_it_works("import os\nassert len([p for p in os.listdir('/proc') if p.isdigit()]) > 0"),
    # files
    "writes outside": _if_it_works(
        "for p in ('/usr/x', '/etc/x', '/x', '/home/x', '/dev/x', '/var/x'):\n    open(p, 'w').write('x')"
    ),
    "poisons the library": _if_it_works("import json\nopen(json.__file__, 'a').write('#')"),
    "deletes the system": "import shutil\nshutil.rmtree('/', ignore_errors=True)\n" + _in_call("return None"),
    "deletes the scratch folder": "import os, shutil\nshutil.rmtree('/tmp', ignore_errors=True)\nos.rmdir(os.getcwd())\n"
    + _in_call("return None"),
    "leaves a file behind": _if_it_works("import os\nopen('/tmp/mark', 'x').close()\nassert len(os.listdir('/tmp')) > 1"),
    "fills the disk": _if_it_works("import os\nfor i in range(64):\n    open(f'f{i}', 'wb').write(bytes(1 << 20))"),
    "countless files": _if_it_works("for i in range(100000):\n    open(f'f{i}', 'w').close()"),
    "device": _if_it_works("import os\nos.mknod('/tmp/d', 0o60666, os.makedev(8, 0))"),
    "open files": _if_it_works("kept = [open('/dev/null') for _ in range(1000)]"),
    "closes everything": "import os\nos.closerange(0, 65536)\n" + _in_call("return 5"),
    "swaps descriptors": "import os\nfor fd in range(3, 32):\n    try:\n        os.dup2(0, fd)\n"
    "    except OSError:\n        pass\n" + _in_call("return 5"),
    # network and kernel
    "network": _if_it_works("import socket\nsocket.socket()"),
    "network by url": _if_it_works("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1/')"),
    "unix socket": _if_it_works("import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0x')"),
    "namespaces": _if_it_works("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0"),
    "mount": _if_it_works("import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, b'') == 0"),
    "unmount": _if_it_works("import ctypes\nassert ctypes.CDLL(None).umount2(b'/proc', 2) == 0"),
    "becomes root": _if_it_works("import os\nos.setuid(0)"),
    "raises limits": _if_it_works("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    "traces": _if_it_works("import ctypes\nassert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0"),
    "raises its priority": _if_it_works("import os\nos.nice(-20)"),
    # text
    "another alphabet's name": "def \u0430dd(a, b):\n    return a + b\n",
    "null byte": "\0def add(a, b):\n    return a + b\n",
    "lone surrogate": "def add(a, b):\n    return '\ud800'\n",
    "reversed text": "def add(a, b):\n    # \u202e return a + b \u2066\n    return None\n",
    "coding cookie": "# -*- coding: rot13 -*-\nqrs nqq(n, o):\n    erghea n + o\n",
    "prose": "The sum of the two numbers is a + b. All 3 tests passed. Score: 1.0",
    "nothing": "",
}

SCRIPTS: dict[str, str] = {
    "prints all sums": "for i in range(1000):\n    print(i)\n",
    "endless output": "while True:\n    print(5)\n",
    "never ends": "print(5, flush=True)\nwhile True:\n    pass\n",
    "fails after printing": "a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(3)\n",
    "reads on": "import sys\nwhile True:\n    sys.stdin.read()\n",
    "closes its output": "import os\nos.close(1)\n",
    "leaves a writer": "import os\nif os.fork() == 0:\n    print(5)\n",
    "prints the verdict": 'print(\'[0, "ok", 1.0, "", 0.0]\')\n',
    "half a sum": "print(5)\n",
    "never stops writing": "import os\nwhile True:\n    os.write(1, b'5')\n",
    "binary rubbish": "import sys\nsys.stdout.buffer.write(bytes(range(256)))\n",
}
