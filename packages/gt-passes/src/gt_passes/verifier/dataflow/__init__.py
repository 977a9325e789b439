"""Whether every output is still computed by the same operators from the same inputs."""
