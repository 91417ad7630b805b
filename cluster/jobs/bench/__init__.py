"""Load on a cluster, and what its clients see."""
