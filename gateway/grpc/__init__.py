"""The gRPC door: the same house as HTTP, with the same errors."""
