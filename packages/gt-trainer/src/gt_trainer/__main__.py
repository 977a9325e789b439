"""The program ``gt-train``, which ``python -m gt_trainer`` is too."""

import locale
import os
import sys

from gt_trainer.command_line.interruption import ending_at_once
from gt_trainer.command_line.standard_streams import make_streams_safe


def main() -> int:
    """Run ``gt-train`` on the arguments of this process, and return the exit status.

    Modules of the current folder can be imported, as by ``python -m``.
    """
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    _be_in_utf8()
    make_streams_safe()
    with ending_at_once():
        from gt_trainer.command_line import cli

        return cli.main()


def _be_in_utf8() -> None:
    """Start again in Python's UTF-8 mode where the locale has another encoding.

    PyTorch and torchtitan read and write text, and names of folders, in the encoding of the locale.
    """
    if locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8"):
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
