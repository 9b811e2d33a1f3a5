"""The synchronous client, generated from `tangram.client.aio`."""
