"""What the operations of Orbax's v1 API share: handlers, registration, directories, errors."""
