"""torchtitan's decoders as Graph Trainer runs them: configurations, placement, attention, loss.

Importing a module of this package imports torchtitan's model code, which copies the device values;
call ``gt_trainer.device.install()`` before. The table of what can be trained, ``catalog``, is free
of torch.
"""
