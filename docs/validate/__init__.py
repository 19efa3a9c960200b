"""Compares and diagnoses reference runs. Needs NumPy: where this Python has none, Debian's starts the program anew."""

import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # BLAS threads that wait leave a busy machine its cores
try:
    import numpy  # noqa: F401
except ImportError:
    if os.path.realpath(sys.executable) != os.path.realpath("/usr/bin/python3") and os.path.exists("/usr/bin/python3"):
        os.execv("/usr/bin/python3", ["/usr/bin/python3"] + sys.argv)
    sys.exit(f"{os.path.basename(sys.argv[0])}: needs NumPy (Debian: python3-numpy)")
