"""One module an operation: real shapes, their bounds, a check against the reference, and peers."""
