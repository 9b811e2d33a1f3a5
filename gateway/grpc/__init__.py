"""The gRPC server: what a trainer calls, with the inputs, results and errors of HTTP."""
