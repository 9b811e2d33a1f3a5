"""What an operation does, whichever door asks for it: HTTP and gRPC read the question and tell the answer."""
