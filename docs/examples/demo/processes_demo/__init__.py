"""`make demo-processes`: a job loses a process in the middle of a save, and goes on with fewer."""
