"""The server: an HTTP API in one process, the engine in another, typed messages between them."""
