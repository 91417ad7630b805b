"""What `ep_nccl.py` times of a layer whose experts are shared."""
