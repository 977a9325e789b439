"""Causal language models of transformers, from a local folder."""
