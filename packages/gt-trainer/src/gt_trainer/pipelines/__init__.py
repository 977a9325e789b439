"""What torchtitan's pipeline options mean here: stages, ranks, order of actions."""
