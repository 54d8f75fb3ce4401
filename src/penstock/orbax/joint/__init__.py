"""How the processes of a job build one checkpoint together, each by its handlers."""
