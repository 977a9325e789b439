"""Stored graphs of a run: what identifies them, which ranks share one, and how a start uses them.

::

    plain_data       whatever shapes a graph, as data of which a fingerprint can be taken
    run_identity     the fingerprint of the graph that a rank is about to capture
"""
