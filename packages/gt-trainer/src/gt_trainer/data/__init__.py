"""Text, tokenizer and dataloader: what a machine without a network can train on.

The modules are imported by name, and this package imports none of them: `text_source`,
`build_tokenizer` and `shipped_tokenizer` work without torch, and `text_dataloader` brings
torch and torchtitan.
"""
