"""Worker threads: the one door to them, one thread for calls in turn, the interpreter, forks."""
