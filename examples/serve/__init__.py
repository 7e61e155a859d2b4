"""A server's loop: continuous batching of a Llama over keys and values in pages."""
