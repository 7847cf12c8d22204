"""How long a plan takes, from the shell to the written file, for the largest models."""
