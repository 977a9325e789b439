"""``python -m gt_trainer`` is ``gt-train``."""

import sys

from gt_trainer.command_line.cli import main

if __name__ == "__main__":
    sys.exit(main())
