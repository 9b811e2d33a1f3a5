"""The asynchronous client, written by hand; `tangram.client.sync` is generated from it."""
