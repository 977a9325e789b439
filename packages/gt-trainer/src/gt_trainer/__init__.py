"""Trains LLMs as captured graphs on torchtitan; the package behind ``gt-train``.

Importing it loads neither torch nor torchtitan: a command line is judged before that is paid for.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
