"""A cluster in a running Ray, as a job."""
