"""The type handlers of Orbax's API: each works when it is called directly, and as a worker of a stage."""
