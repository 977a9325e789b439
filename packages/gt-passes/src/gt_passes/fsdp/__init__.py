"""Passes on FSDP's collectives: shared, bucketed, launched early, waited for late."""
