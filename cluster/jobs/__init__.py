"""What `ray job submit … -- python -m whalepod.cluster.jobs.{serve,ranks,batch,bench}` runs. Each works without Ray's
job server too: a plain command on any machine. The exit code is 0, 1 for a failure, 2 for a wrong use."""
