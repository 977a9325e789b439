"""A run as one page: what its dump folder holds, drawn and told. Standard library alone."""
