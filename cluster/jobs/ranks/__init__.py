"""The ranks of a cluster in a running Ray, as a job."""
