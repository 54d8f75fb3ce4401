"""The options of Orbax's v1 API, and the context in which they hold."""
