"""The event loop of the caller: settings of the interpreter, imports, contexts entered once."""
