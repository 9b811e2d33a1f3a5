"""Generated from gateway/grpc/tangram.proto by scripts/generate-grpc; never edited."""
