"""What can be read off a graph: memory, effects, collectives, order.

Capabilities and the verifier build on it, and it on neither.
"""
