"""From the words after ``gt-train`` to a configuration and an exit status."""
