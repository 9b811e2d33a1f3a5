"""The gRPC door: the same operations as HTTP, with the same errors."""
