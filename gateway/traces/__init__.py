"""OpenTelemetry traces: what each invocation waited for and did, beside the spans of who called it."""
