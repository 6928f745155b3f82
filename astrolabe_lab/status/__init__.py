"""The status of a running engine: published by its own scheduler through shared memory, or reckoned from outside."""
