"""Trees in Orbax's v1 API: the handler of PyTrees, leaf handlers, abstract trees as targets."""
