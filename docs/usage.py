"""Bad input of a program of this folder is one line that names the file or flag, and exit code 2."""
import argparse
import os
import sys

import validate  # noqa: F401  first: it finds the Python that has NumPy
from validate.runs import UsageError, opened, shown  # noqa: F401  opened: for those who import this


def check(is_so, path, what):
    if not is_so:
        raise UsageError(f"{shown(path)}: {what}")


class Parser(argparse.ArgumentParser):
    def __init__(self, text):
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message):
        raise UsageError(message)


def ends_with_one_line(run):
    try:
        return run()
    except OSError as error:
        text = f"{shown(os.fspath(error.filename or 'writing'))}: {error.strerror or error}"
    except UsageError as error:
        text = shown(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr)
    sys.exit(2)
