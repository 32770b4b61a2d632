"""Run an existing script with this package's classes: `python -m hf_ext.takeover script.py args...`.

The script's `AutoModel...from_pretrained` calls then build our classes for official checkpoints. `-m module` runs a
module instead of a file.
"""

import runpy
import sys
from pathlib import Path
from types import ModuleType

from hf_ext.auto import takeover

USAGE = "usage: python -m hf_ext.takeover script.py [args...]\n       python -m hf_ext.takeover -m module [args...]"


def main(arguments: list[str]) -> None:
    """Run a script or a module as `__main__` during a takeover.

    Args:
        arguments: what stands after `python -m hf_ext.takeover`.
    """
    if not arguments or arguments[0] in ("-h", "--help") or arguments[0] == "-m" and len(arguments) < 2:
        print(USAGE)
        raise SystemExit(0 if arguments and arguments[0] in ("-h", "--help") else 2)
    if arguments[0] != "-m" and not Path(arguments[0]).exists():
        print(f"there is no script {arguments[0]}; check the path.\n{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    with takeover():
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            # What `python script.py` does: the script's own folder comes first on the path.
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")


class CallableModule(ModuleType):
    """`import hf_ext.takeover` binds this module to the name of the function; it stays callable."""

    __call__ = staticmethod(takeover)


if __name__ == "__main__":
    main(sys.argv[1:])
else:
    sys.modules[__name__].__class__ = CallableModule
